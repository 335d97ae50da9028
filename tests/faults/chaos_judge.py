"""An HTTP reward service for `chaos.py`: the reward is the fraction of digits in the reply."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Judge(BaseHTTPRequestHandler):
    """Request handler that answers {prompt, response, reference} with a number."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        response = asked["response"]
        body = json.dumps(sum(c.isdigit() for c in response) / max(1, len(response))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
