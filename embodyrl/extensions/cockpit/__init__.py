"""Command `play`: a policy and a person control an environment in turn, on a web page that can record episodes."""
