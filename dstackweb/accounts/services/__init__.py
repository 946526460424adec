"""Changes to accounts. Functions validate their input, not permissions: callers check those with `access` first."""

from dstackweb.accounts.services.bootstrap import Bootstrap, bootstrap, first_admin
from dstackweb.accounts.services.members import (
    accept_invite,
    create_project,
    invite,
    join_by_invite,
    open_invite,
    remove_member,
    set_role,
    withdraw_invite,
)
from dstackweb.accounts.services.project_secrets import delete_secret, secret_names, secret_values, set_secret
from dstackweb.accounts.services.tokens import (
    authenticate_token,
    create_token,
    make_login_link,
    open_login_link,
    revoke_token,
    use_login_link,
)

__all__ = [
    "Bootstrap",
    "accept_invite",
    "authenticate_token",
    "bootstrap",
    "create_project",
    "create_token",
    "delete_secret",
    "first_admin",
    "invite",
    "join_by_invite",
    "make_login_link",
    "open_invite",
    "open_login_link",
    "remove_member",
    "revoke_token",
    "secret_names",
    "secret_values",
    "set_role",
    "set_secret",
    "use_login_link",
    "withdraw_invite",
]
