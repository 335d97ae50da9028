"""Pure lines of the package (no blanks, comments, docstrings), and of what serves only features newer than its audit.

    python scripts/size.py [PACKAGE]

The audit counted commit b281ed7 (17,631 pure lines). A row names whole files: what newer features added inside files
that are older stays in the last row.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

NEWER = {
    "flow policies: pi0, pi0.5, SmolVLA, a small one; SDE, FPO, DSRL": [
        *("policies/flow/**/*.py", "policies/steering/*.py"),
    ],
    "policies that run elsewhere, and serving ours": ["policies/remote/*.py", "commands/serve/*.py"],
    "soft actor-critic, its replay, hindsight and critics": [
        *("learners/sac.py", "learners/replay.py", "algorithms/sac.py", "policies/actor_critic/critics.py"),
        *("learners/hindsight.py", "envs/gym/goals.py", "plan/off_policy.py"),
    ],
    "filtered behaviour cloning": ["learners/filtered_bc.py", "algorithms/filtered_bc.py"],
    "text: games, servers, a critic apart, confined code": [
        *("envs/text/game.py", "policies/causal_lm/server.py", "policies/critic.py", "sandboxed.py"),
    ],
    "rewards of the user's for any simulator, learned ones": ["envs/reward.py"],
    "MetaWorld": ["envs/metaworld/*.py"],
    "OpenVLA-OFT: diffusion and L1 heads that learn, corrections, CUDA graphs": [
        *(f"policies/openvla_oft/{name}.py" for name in ("continuous", "residual", "graphs")),
    ],
    "a policy in a program of the user's; playing in a browser": [
        *("program/acting.py", "program/environment.py", "cli/play.py", "cli/loopback.py"),
    ],
    "result cards, seeds, paired tests, replies": [
        *("monitor/card.py", "monitor/seeds.py", "monitor/paired.py", "monitor/samples.py"),
    ],
    "evaluation protocols, what was held out, distrusted configs": [
        *("plan/protocols.py", "plan/held_out.py", "config/trust.py", "commands/dagger.py"),
    ],
}


def pure_lines(path: Path) -> int:
    """Lines of a file that hold code."""
    text = path.read_text(encoding="utf-8")
    docs = {
        line
        for node in ast.walk(ast.parse(text))
        for item in (getattr(node, "body", None) or [] if isinstance(getattr(node, "body", None), list) else [])
        if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
        for line in range(item.lineno, (item.end_lineno or item.lineno) + 1)
    }
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {n for token in tokens if token.type not in silent for n in range(token.start[0], token.end[0] + 1)}
    return len(code - docs)


def main() -> None:
    """Print the table."""
    package = Path(sys.argv[1] if len(sys.argv) > 1 else "embodyrl")
    lines = {path: pure_lines(path) for path in package.rglob("*.py")}
    rows, left = [], dict(lines)
    for feature, patterns in NEWER.items():
        found = {path for pattern in patterns for path in package.glob(pattern)}
        rows.append((feature, sum(left.pop(path) for path in found)))
    rows += [("all other files: what there was, and what grew inside it", sum(left.values()))]
    for feature, count in [*rows, (f"{len(lines)} files", sum(lines.values()))]:
        sys.stdout.write(f"| {feature} | {count:,} |\n")


if __name__ == "__main__":
    main()
