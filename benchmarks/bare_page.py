"""An HTTP server that does nothing but serve the same page: what a scrape takes where there is nothing to wait for.

    python -m benchmarks.bare_page SERIES

Says ``ready on URL`` and serves until it is ended.
"""

import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer


def serve(num_series: int) -> None:
    """Serve a page of so many lines, as long as a series of a gateway's is."""
    body = b"".join(b'name_of_a_series_total{label="value",tenant="tenant-%d"} 12345\n' % i for i in range(num_series))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(f"ready on http://127.0.0.1:{server.server_port}/metrics", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
