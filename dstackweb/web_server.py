"""The program of the web process: `python -P -m dstackweb.web_server --config … dstackweb.wsgi`."""

from __future__ import annotations

from gunicorn.app.wsgiapp import WSGIApplication


class WebServer(WSGIApplication):
    """gunicorn without its folder among those that modules are imported from: anyone's files may be there."""

    def chdir(self) -> None:
        """Stay in the folder, as gunicorn does by default."""


if __name__ == "__main__":
    WebServer("%(prog)s [OPTIONS] [APP_MODULE]").run()
