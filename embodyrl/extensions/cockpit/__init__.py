"""Command `play`: a policy and a person drive an environment from the browser, and episodes are recorded."""
