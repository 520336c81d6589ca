"""How values show themselves: in one line of text, and as tables and pictures in a notebook."""
