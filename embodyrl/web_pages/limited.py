"""HTTP server with a maximum number of connections."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LimitedServer(ThreadingHTTPServer):
    """HTTP server with a thread per connection; connections above the limit are closed."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], connections: int) -> None:
        """Bind the server to an address; at most `connections` connections are open at a time.

        Raises:
            OSError: the address is not available.
            OverflowError: the port is above 65535.
        """
        self._free_connections = threading.BoundedSemaphore(connections)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection; close the connection if the limit is reached."""
        if self._free_connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle one connection, then make its place available to another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_connections.release()
