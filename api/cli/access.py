"""`bexp token`, `bexp quota` and `bexp audit`: the rights of callers, and the record of their actions."""

from __future__ import annotations

import os
import pwd
import secrets
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from bexp.api.cli.arguments import AsJson
from bexp.api.cli.connection import open_storage
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.cli.results import print_json, print_table
from bexp.storage.owners import ALL_SCOPES, LOCAL_OWNER, USUAL_SCOPES, Caller, Scope

if TYPE_CHECKING:
    from datetime import datetime

token_commands = typer.Typer(no_args_is_help=True)
quota_commands = typer.Typer(no_args_is_help=True)

TokenName = Annotated[str, typer.Argument(metavar="NAME", help="The name of the token.")]
OwnerName = Annotated[str, typer.Argument(metavar="OWNER", help="The owner; '*' for each without a quota of its own.")]
Most = Annotated[int | None, typer.Option(min=0, max=2_000_000_000, metavar="N")]


@token_commands.command("create")
def create(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="What the token is for; default: the owner and a number.")
    ] = None,
    owner: Annotated[str, typer.Option(metavar="NAME", help="Whose explorations it submits and sees.")] = LOCAL_OWNER,
    scope: Annotated[
        list[Scope] | None,
        typer.Option(help="What it allows; can be repeated. Default: submit, read and cancel. admin allows all."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="LIFETIME", help="When it ends: 90d, 12h, 30m or 45s from now.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and print its secret, which is shown only once.

    Example: bexp token create laptop
    """
    from bexp.storage.tokens import create_token, parse_lifetime  # noqa: PLC0415 - the database layer takes long to import

    name = name or f"{owner}-{secrets.token_hex(3)}"
    scopes = frozenset(scope or USUAL_SCOPES)
    with open_storage() as database:
        lifetime = None if expires is None else parse_lifetime(expires)
        secret = create_token(database, name, owner=owner, scopes=scopes, lifetime=lifetime, by=_me())
    if as_json:
        print_json({"name": name, "owner": owner, "scopes": sorted(scopes), "token": secret})
    else:
        say(f"token {name} of {owner}: {', '.join(sorted(scopes))}")
        say("keep it, because it is not shown again")
        typer.echo(secret)


@token_commands.command("list")
def list_tokens(as_json: AsJson = False) -> None:
    """List the tokens, without their secrets.

    Example: bexp token list
    """
    from bexp.storage.tokens import list_tokens as read_tokens  # noqa: PLC0415 - for this command alone

    with open_storage() as database:
        tokens = read_tokens(database)
    if as_json:
        print_json(
            [
                {
                    "name": token.name,
                    "prefix": token.prefix,
                    "owner": token.owner,
                    "scopes": sorted(token.scopes),
                    "created_at": token.created_at.isoformat(),
                    "expires_at": None if token.expires_at is None else token.expires_at.isoformat(),
                }
                for token in tokens
            ]
        )
        return
    print_table(
        ("NAME", "TOKEN", "OWNER", "SCOPES", "CREATED", "EXPIRES"),
        [
            (
                *(token.name, f"{token.prefix}...", token.owner, " ".join(sorted(token.scopes))),
                *(_moment(token.created_at), _moment(token.expires_at)),
            )
            for token in tokens
        ],
    )


@token_commands.command("revoke")
def revoke(name: TokenName) -> None:
    """Revoke a token; requests and streams under it end within 5 s.

    Example: bexp token revoke laptop
    """
    from bexp.storage.tokens import revoke_token  # noqa: PLC0415 - for this command alone

    with open_storage() as database:
        revoked = revoke_token(database, name, by=_me())
    if not revoked:
        raise CommandError(ExitCode.USAGE, f"there is no token named {name!r}")
    say(f"token {name} is revoked")


@quota_commands.command("set")
def set_quota(
    owner: OwnerName,
    queued: Most = None,
    running: Most = None,
    stored_gb: Annotated[float | None, typer.Option(min=0, max=1e6, metavar="GB")] = None,
) -> None:
    """Set how many explorations of an owner may wait and run, and how much all of them may take in the database.

    An option that is left out sets no limit, but 1 GB for --stored-gb. Without any option, the quota is removed.

    Example: bexp quota set team-a --queued 100 --stored-gb 5
    """
    from bexp.storage.quotas import Quota  # noqa: PLC0415 - for this command alone
    from bexp.storage.quotas import set_quota as store_quota  # noqa: PLC0415 - for this command alone

    quota = Quota(queued, running, None if stored_gb is None else round(stored_gb * 1e9))
    with open_storage() as database:
        store_quota(database, owner, None if quota == Quota() else quota, by=_me())
    say(f"the quota of {owner} is {'removed' if quota == Quota() else 'set'}")


@quota_commands.command("list")
def list_quotas(as_json: AsJson = False) -> None:
    """List the quotas; '*' holds for each owner without a quota of its own.

    Example: bexp quota list
    """
    from dataclasses import asdict  # noqa: PLC0415 - for this command alone

    from bexp.storage.quotas import list_quotas as read_quotas  # noqa: PLC0415 - for this command alone

    with open_storage() as database:
        quotas = read_quotas(database)
    if as_json:
        print_json({owner: asdict(quota) for owner, quota in quotas.items()})
        return
    rows = [
        (owner, _number(quota.max_queued), _number(quota.max_running), f"{quota.stored_limit / 1e9:g} GB")
        for owner, quota in quotas.items()
    ]
    print_table(("OWNER", "QUEUED", "RUNNING", "STORED"), rows)


def audit(
    owner: Annotated[str | None, typer.Option(metavar="NAME", help="Only what this owner did.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="How many, the newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show who submitted, cancelled, resumed, deleted or annotated what, and who changed tokens and quotas.

    Each line says from where and when.

    Example: bexp audit
    """
    from bexp.storage.audit import read_audit  # noqa: PLC0415 - for this command alone

    with open_storage() as database:
        records = read_audit(database, owner=owner, limit=limit)
    if as_json:
        print_json(
            [
                {"at": r.at.isoformat(), "action": r.action, "subject": r.subject, "owner": r.owner}
                | {"token": r.token, "origin": r.origin}
                for r in records
            ]
        )
        return
    print_table(
        ("AT", "ACTION", "SUBJECT", "OWNER", "TOKEN", "FROM"),
        [(_moment(r.at), r.action.value, r.subject, r.owner, r.token or "-", r.origin or "-") for r in records],
    )


def _me() -> Caller:
    user = str(os.getuid())
    with suppress(KeyError):  # a user id without a name
        user = pwd.getpwuid(os.getuid()).pw_name
    return Caller(LOCAL_OWNER, ALL_SCOPES, origin=f"{user}@{socket.gethostname()}")


def _moment(moment: datetime | None) -> str:
    return "-" if moment is None else f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
