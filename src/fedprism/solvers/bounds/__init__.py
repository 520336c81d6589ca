"""What no attacker can beat: lower bounds of the error of any estimate made from an update."""
