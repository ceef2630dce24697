"""What the command ``pstar`` says, before it is printed."""
