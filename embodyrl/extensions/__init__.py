"""Optional parts: each folder is one extension, which no module outside the folder imports."""
