"""Any Gymnasium environment. Importing this package does not import gymnasium."""
