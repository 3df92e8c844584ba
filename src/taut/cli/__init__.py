"""The commands of `taut`, one a file."""
