"""What a call used, and from where."""
