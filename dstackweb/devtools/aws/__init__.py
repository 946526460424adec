"""A small AWS on loopback that real boto3 talks to over HTTP: what it does and what not is told in README.md."""

from dstackweb.devtools.aws.handle import Cloud

__all__ = ["Cloud"]
