"""A policy as a server, and a page on which people play it."""
