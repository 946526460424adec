"""Bearer tokens that carry an id under the server's signature, so that nothing needs to be stored to check them."""

from __future__ import annotations

from uuid import UUID

from django.core import signing

JOB_SALT, TASKS_SALT = "dstackweb.job", "dstackweb.tasks"


def job_token(job_id: UUID) -> str:
    """The token of a job's runner."""
    return sign_id(job_id, JOB_SALT)


def job_of_token(token: str) -> UUID | None:
    """The job of a runner's token; None for any other string."""
    return read_id(token, JOB_SALT)


def tasks_token(job_id: UUID) -> str:
    """The token of a job's commands: valid for reporting tasks only."""
    return sign_id(job_id, TASKS_SALT)


def job_of_tasks_token(token: str) -> UUID | None:
    """The job of a token for reporting tasks; None for any other string."""
    return read_id(token, TASKS_SALT)


def sign_id(value: UUID, salt: str) -> str:
    """A token for `value`. Tokens with different salts are never accepted for each other."""
    return signing.Signer(salt=salt).sign(str(value))


def read_id(token: str, salt: str) -> UUID | None:
    """The id that `sign_id` signed with this salt; None for any other string."""
    try:
        return UUID(signing.Signer(salt=salt).unsign(token))
    except (signing.BadSignature, ValueError):
        return None
