"""The command `play`: a web page on which a policy and a person take turns controlling an environment."""
