"""Stands in for `jupyter-lab`: answers on the socket that it is given with what it got, and echoes WebSockets."""

import base64
import hashlib
import json
import os
import socketserver
import struct
import sys

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        while line := self.rfile.readline():
            method, path, _ = line.decode().split()
            headers = []
            while line := self.rfile.readline().strip():
                name, _, value = line.decode().partition(": ")
                headers.append((name, value))
            given = {name.lower(): value for name, value in headers}
            if (token := os.environ.get("JUPYTER_TOKEN")) and given.get("authorization") != f"token {token}":
                return self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            if given.get("upgrade", "").lower() == "websocket":
                return self.echo(given)
            if self.other(path, given):
                return
            body = self.rfile.read(int(given.get("content-length", "0")))
            if given.get("transfer-encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            answer = json.dumps({"method": method, "path": path, "headers": headers, "size": len(body)}).encode()
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nSet-Cookie: own=1; Domain=localhost; Path=/\r\n"
                b"Set-Cookie: dstackweb-gateway=stolen\r\nX-Uid: %d\r\nContent-Length: %d\r\n\r\n%s"
                % (os.getuid(), len(answer), answer)
            )

    def other(self, path, given):
        """Whether it was answered otherwise, and the connection ends."""
        return False

    def echo(self, given):
        proof = base64.b64encode(hashlib.sha1((given["sec-websocket-key"] + GUID).encode()).digest()).decode()
        lines = [
            "HTTP/1.1 101 x",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {proof}",
            "",
            "",
        ]
        self.wfile.write("\r\n".join(lines).encode())
        while len(head := self.rfile.read(2)) == 2:
            opcode, size = head[0] & 15, head[1] & 127
            if size == 126:
                (size,) = struct.unpack("!H", self.rfile.read(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self.rfile.read(8))
            key, data = self.rfile.read(4), self.rfile.read(size)
            data = bytes(byte ^ key[at % 4] for at, byte in enumerate(data))
            if opcode == 8:
                return
            length = bytes([size]) if size < 126 else struct.pack("!BQ", 127, size)
            self.wfile.write(bytes([0x80 | opcode]) + length + data)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


if __name__ == "__main__":
    path = next(word.partition("=")[2] for word in sys.argv if word.startswith("--ServerApp.sock="))
    print("serving", flush=True)
    Server(path, Handler).serve_forever()
