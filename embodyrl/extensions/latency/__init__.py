"""Tables and plots of success against the inference delay."""
