from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "dstackweb.accounts"

    def ready(self) -> None:
        from dstackweb.accounts import sessions

        sessions.connect()
