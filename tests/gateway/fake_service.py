"""A service: answers as `fake_jupyter` does on its port, streams, breaks off, and is ill while there is a file."""

import os
import socketserver
import time

import fake_jupyter

ILL = os.path.join(os.environ["DSTACK_RUN_DIR"], "ill")
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"


class Handler(fake_jupyter.Handler):
    def other(self, path, given):
        if path == "/health":
            status = b"503 Ill" if os.path.exists(ILL) else b"204 Well"
            self.wfile.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
        elif path == "/events":
            self.wfile.write(HEAD)
            for number in range(3):
                self.send(b"data: %d\n\n" % number)
                time.sleep(0.5)
            self.send(b"")
        elif path == "/mirror":  # each part of the body as it comes
            self.wfile.write(HEAD)
            while size := int(self.rfile.readline(), 16):
                self.send(self.rfile.read(size))
                self.rfile.readline()
            self.send(b"")
        elif path == "/cut":
            self.wfile.write(HEAD)
            self.send(b"half of it")
        elif path != "/break":
            return False
        return True

    def send(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True


if __name__ == "__main__":
    Server(("127.0.0.1", int(os.environ["DSTACK_SERVICE_PORT"])), Handler).serve_forever()
