"""Configs of other frameworks, read and translated. What is known of a system is data, in its folder."""
