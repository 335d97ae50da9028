"""`-m`: one run per combination of values."""
