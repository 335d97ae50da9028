"""Config sections that `serve` uses."""

from embodyrl.plan.schema import Reads

SERVE = Reads(sections="trust model ckpt env", dry_run="embodyrl.extensions.serving.serve:server_facts")
