"""What the papers' tables share."""
