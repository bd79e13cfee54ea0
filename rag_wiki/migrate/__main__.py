"""The command line: `python -m rag_wiki.migrate OLD NEW`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from rag_wiki.migrate.report import MigrationReport

# What takes long to import is imported where it is used: an interruption meanwhile is one as any other.

__all__ = ["main"]

_EPILOG = """\
examples:
  python -m rag_wiki.migrate sqlite:///rag_wiki.db sqlite:///new.db --dry-run
  python -m rag_wiki.migrate sqlite:///rag_wiki.db sqlite:///rag_wiki.db --chunks wiki --wiki-save-dir wiki
  python -m rag_wiki.migrate redis://localhost/0 postgresql://app@db/app --embeddings ollama:nomic-embed-text
  python -m rag_wiki.migrate sqlite:///wiki.db postgresql://app@db/app --this-release

Stop the application first. The old place is only read; running this again adds what is missing. What was removed from
the new place since an earlier run stays away (--bring-back brings it). Who was forgotten in the new place is still in
the old one: remove them there, too.

A text with a colon after its second letter or later is a URL; a file of such a name is named by ./ before it.

exit codes: 0 all is there and was read back; 1 it could not be done; 2 wrong arguments; 3 done, but some records could
not be brought over, were left alone because the new place has them in another form, or were not read back as written:
they are named; 130 interrupted. With --json an error is printed as {"error": ..., "exit_code": ...}.
"""
_INTERRUPTED = "interrupted. What was brought over so far stays; the next run goes on from there."


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments; those of the process when `None`.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if argv is None else argv
    parser = _parser(as_json="--json" in arguments)
    options = parser.parse_args(arguments)
    for name in ("embeddings", "embedding_name", "overwrite"):
        if options.this_release and getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} has no meaning with --this-release: users are copied as they are")
    progress = _Progress(sys.stderr, "users" if options.this_release else "records")
    try:
        report = _carried(options, progress)
    except KeyboardInterrupt:
        progress.end()
        return _fail(_INTERRUPTED, 130, as_json=options.json)
    except Exception as error:  # each database and each model has errors of its own, and people read one sentence
        progress.end()
        return _fail(_sentence(error), 1, as_json=options.json)
    progress.end()
    _say(sys.stdout, json.dumps(report.to_dict(), indent=2) if options.json else _told(report, options))
    return 0 if report.is_whole else 3


def _carried(options: argparse.Namespace, progress: _Progress) -> MigrationReport:
    from rag_wiki.config import RagWikiRetrieverConfig
    from rag_wiki.migrate.carry import MismatchError, migrate
    from rag_wiki.migrate.copying import copy_users

    try:
        if options.this_release:
            return copy_users(
                options.old,
                options.new,
                old_chunks=options.chunks,
                new_chunks=options.wiki_save_dir,
                dry_run=options.dry_run,
                bring_back=options.bring_back,
                on_progress=None if options.quiet else progress,
            )
        return migrate(
            options.old,
            options.new,
            old_chunks=options.chunks,
            embedding_model=None if options.embeddings is None else _embeddings(options.embeddings),
            config=RagWikiRetrieverConfig(wiki_save_dir=options.wiki_save_dir, embedding_name=options.embedding_name),
            dry_run=options.dry_run,
            overwrite=options.overwrite,
            bring_back=options.bring_back,
            on_progress=None if options.quiet else progress,
        )
    except MismatchError as error:
        return error.report


def _sentence(error: Exception) -> str:
    from rag_wiki.errors import RagWikiError
    from rag_wiki.migrate.places import reason

    return str(error) if isinstance(error, RagWikiError) else f"{type(error).__name__}: {reason(error)}"


def _fail(message: str, exit_code: int, *, as_json: bool) -> int:
    if as_json:
        _say(sys.stdout, json.dumps({"error": message, "exit_code": exit_code}))
    _say(sys.stderr, f"rag_wiki.migrate: {message}")
    return exit_code


class _Parser(argparse.ArgumentParser):
    """Says in JSON, too, what is wrong with the arguments."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit."""
        if self.as_json:
            _say(sys.stdout, json.dumps({"error": message, "exit_code": 2}))
        super().error(message)


def _parser(*, as_json: bool) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m rag_wiki.migrate",
        description="Bring what langchain-rag-wiki 0.2 kept over into a place of this release, and read it back.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.as_json = as_json
    parser.add_argument("old", metavar="OLD", help="sqlite:///path.db, a path, or redis://host:6379/0")
    parser.add_argument("new", metavar="NEW", help="sqlite:///path.db, postgresql://… or redis://…; may be the old one")
    parser.add_argument("--chunks", metavar="FOLDER", help="the wiki_save_dir of 0.2.2 or 0.2.4, which has the chunks")
    parser.add_argument(
        "--wiki-save-dir",
        metavar="FOLDER",
        help="the wiki_save_dir of your settings now, where chunks go to; without it they go beside the state",
    )
    parser.add_argument(
        "--embeddings",
        metavar="MODEL",
        help="the embedding model, as provider:model or local: old vectors stay where they are this model's, the "
        "others are made; without it, reindex() makes them later",
    )
    parser.add_argument("--embedding-name", metavar="NAME", help="the embedding_name of your settings, if you set one")
    parser.add_argument(
        "--this-release",
        action="store_true",
        help="OLD is of this release, too, and may be postgresql://…: its users go to another store as they are; "
        "--chunks is its wiki_save_dir",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what the new place has in another form")
    parser.add_argument(
        "--bring-back", action="store_true", help="bring what was removed from the new place since an earlier run, too"
    )
    parser.add_argument("--dry-run", action="store_true", help="write nothing, only say what would be done")
    parser.add_argument(
        "--json", action="store_true", help="print the report, with every document, or the error as JSON"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _embeddings(name: str) -> Embeddings:
    """The embedding model of a name.

    Raises:
        ConfigurationError: `langchain`, which knows the providers, is not installed.
        MissingExtraError: The local model is not installed.
    """
    from rag_wiki.errors import ConfigurationError

    if name == "local":
        from rag_wiki.embeddings import LocalEmbeddings

        return LocalEmbeddings()
    try:
        from langchain.embeddings import init_embeddings
    except ImportError as error:
        msg = f"--embeddings {name} needs langchain and the provider's package. Install it with: pip install langchain"
        raise ConfigurationError(msg) from error
    return init_embeddings(name)


def _told(report: MigrationReport, options: argparse.Namespace) -> str:
    lines = [report.render(), "", *([] if options.this_release else _left_to_do(report, options))]
    if report.removed:
        lines.append("What was removed from the new place is still in the old one: remove it there, too.")
    if report.dry_run:
        lines.append("This was a dry run: nothing was written.")
    elif report.is_whole:
        lines.append("All of it is in the new place, read back and compared. Nothing in the old place was changed.")
    else:
        lines.append("Not all of it is there as the old place has it: see above.")
    return "\n".join(lines)


def _left_to_do(report: MigrationReport, options: argparse.Namespace) -> list[str]:
    """What the arguments left for later."""
    lines = []
    if report.kept and not options.overwrite:
        lines.append("What was left alone, --overwrite replaces.")
    if report.chunks and options.wiki_save_dir is None and options.chunks is not None:
        lines.append(
            "Chunks are beside the state, where a retriever without wiki_save_dir looks. If your settings have one, "
            "run this again with --wiki-save-dir."
        )
    if report.chunks and options.chunks is None:
        lines.append("Chunks were split from the contents. If 0.2 had a wiki_save_dir, --chunks brings its own.")
    if options.embeddings is None and report.chunks:
        lines.append("Vectors wait for the model: give it with --embeddings, or call reindex() for each user.")
    return lines


class _Progress:
    """One line on a terminal, or a line now and then elsewhere."""

    _every_seconds = 5.0

    def __init__(self, stream: TextIO | None, what: str) -> None:
        self._stream = stream
        self._what = what
        self._on_terminal = stream is not None and stream.isatty()
        self._began = self._told = time.monotonic()
        self._is_open = False

    def __call__(self, done: int, total: int) -> None:
        """Tell how far it is."""
        now = time.monotonic()
        if not self._on_terminal and now - self._told < self._every_seconds:
            return
        self._told = now
        start, end = ("\r", "") if self._on_terminal else ("", "\n")
        rate = done / max(now - self._began, 1e-9)
        self._write(f"{start}{done:,} of {total:,} {self._what} ({rate:,.0f} a second){end}")
        self._is_open = self._on_terminal

    def end(self) -> None:
        """End the line."""
        if self._is_open:
            self._write("\n")
            self._is_open = False

    def _write(self, text: str) -> None:
        if self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                # Nobody reads it: that must not break what is told of.
                _close(self._stream)
                self._stream = None


def _say(stream: TextIO | None, text: str) -> None:
    """Print a text. Nobody may be reading: that changes nothing of what was done, nor of the exit code."""
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except (OSError, ValueError) as error:
        # What is left in the buffer would fail once more when the process ends.
        _close(stream)
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            _say(sys.stderr, f"rag_wiki.migrate: what was done can't be printed: {error}")


def _close(stream: Any) -> None:
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
    except (OSError, ValueError):
        return


if __name__ == "__main__":
    sys.exit(main())
