"""Policy server, and a web page to watch and control a policy."""
