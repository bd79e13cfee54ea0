"""The tables of a database that holds state and chunks.

A record is one row: its JSON payload, and beside it only the columns that are searched or change by themselves. So
the list of a record's fields exists once, in `UserDocRecord`.
"""

from __future__ import annotations

import sqlalchemy as sa

__all__ = [
    "chunks_table",
    "documents_table",
    "events_table",
    "hits_table",
    "metadata",
    "notes_table",
    "schema_table",
    "texts_table",
    "users_table",
]

metadata = sa.MetaData()
_KEY = sa.String(255)


def key_column(name: str) -> sa.Column[str]:
    return sa.Column(name, _KEY, primary_key=True)


schema_table = sa.Table(
    "rag_wiki_schema",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
)
users_table = sa.Table(
    "rag_wiki_users",
    metadata,
    key_column("user_key"),
    sa.Column("user_id", sa.Text, nullable=False),
    sa.Column("queries", sa.BigInteger, nullable=False),
    sa.Column("searches", sa.BigInteger, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("saved", sa.BigInteger, nullable=False),
    sa.Column("floor", sa.BigInteger, nullable=False),
)
documents_table = sa.Table(
    "rag_wiki_documents",
    metadata,
    key_column("user_key"),
    key_column("doc_key"),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("idle_seen", sa.BigInteger),
    sa.Column("idle_hit", sa.BigInteger),
    sa.Column("payload", sa.Text, nullable=False),
    sa.Column("score", sa.Float(53), nullable=False),
    sa.Column("content", sa.Text),
    sa.Column("revised", sa.BigInteger),
    sa.Index("rag_wiki_documents_by_state", "user_key", "state"),
    sa.Index("rag_wiki_documents_by_seen", "user_key", "idle_seen"),
    sa.Index("rag_wiki_documents_by_hit", "user_key", "idle_hit"),
)
revised_column = documents_table.c.revised
# Few documents are ever saved; the others are not in it.
sa.Index(
    "rag_wiki_documents_by_revision",
    documents_table.c.user_key,
    revised_column,
    postgresql_where=revised_column.is_not(None),
    sqlite_where=revised_column.is_not(None),
)
events_table = sa.Table(
    "rag_wiki_events",
    metadata,
    key_column("user_key"),
    key_column("doc_key"),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("payload", sa.Text, nullable=False),
)
texts_table = sa.Table(
    "rag_wiki_texts",
    metadata,
    key_column("user_key"),
    key_column("doc_key"),
    key_column("digest"),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("payload", sa.Text, nullable=False),
)
chunks_table = sa.Table(
    "rag_wiki_chunks",
    metadata,
    key_column("user_key"),
    key_column("doc_key"),
    key_column("copy_id"),
    sa.Column("chunks", sa.BigInteger, nullable=False),
    sa.Column("header", sa.Text, nullable=False),
    sa.Column("texts", sa.Text, nullable=False),
    sa.Column("vectors", sa.LargeBinary, nullable=False),
)
hits_table = sa.Table(
    "rag_wiki_chunk_hits",
    metadata,
    key_column("user_key"),
    key_column("doc_key"),
    key_column("copy_id"),
    sa.Column("chunk_index", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("hit_count", sa.BigInteger, nullable=False),
    sa.Column("last_hit_at", sa.String(40), nullable=False),
)
notes_table = sa.Table(
    "rag_wiki_notes",
    metadata,
    key_column("name"),
    sa.Column("text", sa.Text, nullable=False),
)
