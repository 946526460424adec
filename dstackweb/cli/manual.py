"""The ends of the help texts: examples of each command, exit codes, environment and files."""

from __future__ import annotations

from dstackweb.cli.language import N_, _

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "apply": (
        ("apply -f train.yaml", "show the plan, ask, submit, follow; exit with the run's code"),
        ("apply -f train.yaml --name lr-3 -e LR=3e-4 -y", "override the file, and don't ask"),
        ("apply -f train.yaml -y -d -q", "in scripts: print the run's id and don't wait for it"),
        ("apply -f train.yaml --dry-run", "only show the plan"),
    ),
    "ps": (
        ("ps", "active runs, newest first"),
        ("ps -a --limit 200", "ended runs too"),
        ("ps --start", "when waiting runs are expected to start"),
        ("ps -w", "the same table, kept up to date"),
    ),
    "sweep": (
        ("sweep", "the project's sweeps, newest first"),
        ("sweep lr -w", "one sweep and its runs, until it has ended"),
        ("sweep lr --status failed", "its failed runs with their parameters"),
        ("sweep lr --csv", "parameters and outcomes, for a spreadsheet"),
    ),
    "retry": (("retry lr", "the failed runs of the sweep lr once more"),),
    "show": (
        ("show train-a", "status, times, nodes, settings and events"),
        ("show train-a -w", "until it has ended"),
        ("show train-a --json", "for programs"),
    ),
    "diff": (
        ("diff train-a train-b", "what differs, how long each part took, how they ended"),
        ("diff train-a", "with the run before that had its name"),
        ("diff train-a train-b --all", "equal settings too"),
    ),
    "logs": (
        ("logs -f train-a", "follow until the run ends"),
        ("logs train-a --tail 100 --node 1", "the last lines of the second node"),
        ("logs train-a --attempt 1", "the log of a try before a retry"),
    ),
    "artifacts": (
        ("artifacts train-a", "the files that it left in $DSTACKWEB_ARTIFACTS"),
        ("artifacts train-a --download results", "save them to results/ATTEMPT-NODE/; what is there already stays"),
        ("artifacts train-a --node 1 -q", "only the paths of the second node's files"),
    ),
    "stop": (
        ("stop train-a", "SIGTERM, then SIGKILL after the run's stop_duration"),
        ("stop lr", "all runs of the sweep lr, and those that were to come"),
        ("stop train-a --abort -y", "SIGKILL at once, without a question"),
    ),
    "delete": (("delete train-a", "only ended runs can be deleted"),),
    "progress": (
        ("progress sweep", "a run's tasks by prefix, live"),
        ("progress sweep --failed --once", "its failed tasks with their messages"),
        ("progress", "the runs of the project by prefix"),
    ),
    "ssh": (
        ("ssh dev-snug-wren", "a shell in a dev environment or hold, once it has started"),
        ("ssh dev-snug-wren nvidia-smi", "one command"),
        ("ssh dev-snug-wren -- -N -L 6006:localhost:6006", "with ssh's own options: a port of it on your machine"),
        ("ssh dev-snug-wren --print", "the ssh command, for other programs"),
    ),
    "key add": (("key add", "your key of ~/.ssh"), ("key add work.pub --name work", "another one")),
    "key list": (("key list", "with the fingerprint of the server"),),
    "key remove": (("key remove 3", "by the id that key list shows"),),
    "hold": (
        ("hold --gpu A100:2 --for 3h", "wait for two GPUs and print how to connect"),
        ("hold --cpu 4 --for 30m -d", "print only the name, and don't wait"),
    ),
    "extend": (("extend hold-swift-otter 1h", "keep a hold for another hour"),),
    "queue": (
        ("queue", "the queue default in its order"),
        ("queue nightly -w", "another one, kept up to date"),
        ("queue -l", "all queues of the project"),
        ("queue --view sweeps", "the runs that a saved view shows"),
        ("queue nightly --pause", "as a manager: start no more runs"),
    ),
    "view list": (("view list", "with what each shows"),),
    "view save": (
        ("view save sweeps --search sweep --group reason", "runs with sweep in their name, by what they wait for"),
        ("view save urgent --priority 80 --shared", "as a manager: for all members"),
    ),
    "view rename": (("view rename sweeps lr-sweeps", "it keeps its filters"),),
    "view default": (
        ("view default sweeps", "your queue pages begin with it"),
        ("view default sweeps --off", "or not"),
    ),
    "view remove": (("view remove sweeps", "your own; with --shared that of all members"),),
    "move": (
        ("move train-a --before eval-3", "to another position in its queue"),
        ("move train-a train-b --top --dry-run", "only show what would change"),
        ("move train-a --to nightly --dry-run", "what another queue would mean"),
        ("move --undo", "undo your latest move, within ten seconds"),
    ),
    "priority": (("priority train-a 70", "0 to 100; higher starts first"),),
    "release": (("release eval-3", "start it without waiting for the runs in its `after`"),),
    "history": (("history", "waits of the last seven days"), ("history nightly --days 30", "of one queue")),
    "metrics": (("metrics train-a", "live"), ("metrics train-a --once", "once, as in a script")),
    "keep": (('keep train-a --reason "waiting for the data set"', "for the project's default time"),),
    "what-if": (("what-if --min 10 --window 30m", "which runs such a policy would have stopped"),),
    "usage": (
        ("usage --month 2026-11", "GPU-hours, idle share and cost of each member"),
        ("usage --by queue --csv", "a row per month, for a spreadsheet"),
    ),
    "offers": (
        ("offers --gpu A100:40GB..:1.. --spot --max-price 15", "what a run could use, the cheapest first"),
        ("offers -w", "kept up to date"),
    ),
    "quotas": (("quotas", "of all cloud accounts"),),
    "cache": (("cache aws --hours 6", "by hour"),),
    "host list": (("host list", "all hosts"), ("host list -q", "only their names")),
    "host label": (("host label box disk=nvme rack-", "set one label and remove another"),),
    "host drain": (("host drain box", "before maintenance"),),
    "host gone": (('host gone box --reason "the power supply burned"', "its jobs end, and runs with retry go on"),),
    "host join": (("host join https://gpus.example.org --token dwj_…", "the Hosts page shows this line complete"),),
    "login": (
        ("login https://gpus.example.org", "asks for the token"),
        ("login https://gpus.example.org --server work < token.txt", "from a file, and under a name of its own"),
    ),
    "logout": (("logout", "of the server in use"), ("logout --server work", "of another one")),
    "projects": (("projects", "yours"),),
    "servers list": (("servers list", "the current one is marked"),),
    "servers add": (("servers add work https://gpus.example.org", "asks for the token"),),
    "servers use": (
        ("servers use work", "for all later commands"),
        ("servers use work --project research", "and another project there"),
    ),
    "servers remove": (("servers remove work", "its token stays valid until you revoke it"),),
}
"""Of each command: what follows `dstackweb`, and what it is for."""

EPILOG = N_("""
**Exit codes**: 0 success · 1 refused or failed · 2 wrong usage · 3 server not reached · 130 Ctrl-C.
`apply` has the exit code of the run that it followed.

**Environment**: DSTACKWEB_SERVER, a saved server · DSTACKWEB_URL, DSTACKWEB_TOKEN and DSTACKWEB_PROJECT, instead of
a saved one · DSTACKWEB_LANGUAGE (or LC_ALL, LC_MESSAGES, LANG), zh_Hans or en · NO_COLOR, no colours.

**Files**: ~/.config/dstackweb/config.toml has the saved servers with their tokens.

**Examples of a command**: dstackweb COMMAND --help. Completion of names with Tab: dstackweb --install-completion.
""")


def epilog(path: str) -> str | None:
    """The examples of a command (`ps`, `host list`) as Markdown."""
    heading, lines = _("Examples"), [f"- `dstackweb {line}`: {_(about)}" for line, about in EXAMPLES.get(path, ())]
    return "\n\n".join([f"**{heading}**", "\n".join(lines)]) if lines else None
