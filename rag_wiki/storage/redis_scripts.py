"""The Lua that Redis runs: what must happen in one moment, and what would be many commands from a client.

Documents travel as lines of one argument or answer: a client packs and unpacks every value by itself, which for
hundreds of them takes longer than the server's work.
"""

from __future__ import annotations

__all__ = ["COMMIT", "COUNT", "HIT", "READ", "REMOVE", "REVISED", "START", "SWAP", "USER_FIELDS", "WRITE"]

USER_FIELDS = ("user_id", "queries", "searches", "revision", "saved", "floor", "version")
"""The fields of a user's hash, in the order in which all answers have them."""

_READ_FUNCTIONS = f"""
local function read_user(key)
  return redis.call('HMGET', key, {", ".join(f"'{name}'" for name in USER_FIELDS)})
end
local function read_lines(key, first, last)
  if last < first then return '' end
  local values = redis.call('HMGET', key, unpack(ARGV, first, last))
  for i = 1, #values do values[i] = values[i] and '=' .. values[i] or '' end
  return table.concat(values, '\\n')
end
"""
"""Documents and contents come as lines, each with a `=` before it, empty where there is none: a client takes hundreds
of values apart one by one.
"""

READ = (
    _READ_FUNCTIONS
    + """
return {read_user(KEYS[1]), read_lines(KEYS[2], 2, #ARGV), ARGV[1] == '1' and read_lines(KEYS[3], 2, #ARGV) or ''}
"""
)
"""KEYS: user, docs, content. ARGV: '1' to read content, then document keys. One moment of all of it."""

START = (
    _READ_FUNCTIONS
    + """
local user = read_user(KEYS[1])
local seen = tonumber(user[2] or 0) + 1 - tonumber(ARGV[1])
local hit = tonumber(user[3] or 0) + 1 - tonumber(ARGV[2]) * tonumber(user[5] or 0)
return {user, redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', seen), redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', hit)}
"""
)
"""KEYS: user, seen, hit. ARGV: lapse_after, demote_after."""

REVISED = (
    _READ_FUNCTIONS
    + """
local keys = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[1], '+inf', 'LIMIT', 0, tonumber(ARGV[2]) + 1)
if #keys > tonumber(ARGV[2]) then return {read_user(KEYS[1])} end
local values = #keys == 0 and {} or redis.call('HMGET', KEYS[2], unpack(keys))
return {read_user(KEYS[1]), keys, values}
"""
)
"""KEYS: user, docs, revised. ARGV: a revision, and how many documents are worth it. Those revised beyond it."""

_HIT_FUNCTION = """
local function hit(hits, chunks, copy_id, moment, count, ...)
  if redis.call('HEXISTS', chunks, copy_id .. ':header') == 0 then return end
  for _, index in ipairs({...}) do
    redis.call('HINCRBY', hits, index, count)
    redis.call('HSET', hits, index .. '@', moment)
  end
end
"""
"""Hits of a copy that is gone would be a key that nobody ever finds again, so they are not written."""

HIT = (
    _HIT_FUNCTION
    + """
hit(KEYS[1], KEYS[2], unpack(ARGV))
"""
)
"""KEYS: hits, chunks. ARGV: copy id, moment, count, chunk indices."""

WRITE = """
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
"""
"""KEYS: chunked, chunks. ARGV: document key, then the copy's parts, each a name and a value.

A script rather than a transaction, which redis-py 5 has not for a cluster.
"""

REMOVE = """
local gone = 0
for i = 2, #ARGV do
  gone = gone + redis.call('HDEL', KEYS[2], ARGV[i] .. ':header')
  redis.call('HDEL', KEYS[2], ARGV[i] .. ':texts', ARGV[i] .. ':vectors')
  redis.call('DEL', KEYS[i + 1])
end
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('SREM', KEYS[1], ARGV[1]) end
return gone
"""
"""Remove copies, and their document from the set when none is left, so that a copy written meanwhile stays in it.

KEYS: chunked, chunks, the hits of each copy. ARGV: document key, copy ids.
"""

_DOCUMENTS_FUNCTION = """
local function documents(docs, saved, seen, hit, revised, lines)
  local function place(set, reading, key)
    if reading == '-' then redis.call('ZREM', set, key) else redis.call('ZADD', set, reading, key) end
  end
  local pattern = '(%S+) (%S+) (%S+) (%S+) (%S+) ([^\\n]*)\\n'
  for key, is_saved, seen_at, hit_at, revised_at, value in string.gmatch(lines, pattern) do
    redis.call('HSET', docs, key, value)
    if is_saved ~= '=' then
      place(saved, is_saved, key)
      place(seen, seen_at, key)
      place(hit, hit_at, key)
      if revised_at ~= '-' then redis.call('ZADD', revised, revised_at, key) end
    end
  end
end
"""
"""Everything that documents are in, from one argument of a line each: a client packs every argument by itself."""

_SCORES_FUNCTION = """
local function scores(docs, lines)
  for key, score in string.gmatch(lines, '(%S+) (%S+)\\n') do
    local state, payload = string.match(redis.call('HGET', docs, key) or '', '^(%S+) %S+ (.*)$')
    if state then redis.call('HSET', docs, key, state .. ' ' .. score .. ' ' .. payload) end
  end
end
"""

COMMIT = (
    _HIT_FUNCTION
    + _DOCUMENTS_FUNCTION
    + _SCORES_FUNCTION
    + _READ_FUNCTIONS
    + """
local version = redis.call('HGET', KEYS[1], 'version') or ''
if version ~= '' and version == ARGV[2] then return {1} end
local absent, guessed = tonumber(ARGV[3]), tonumber(ARGV[4])
local right = version == ARGV[1]
for i = 5, 4 + absent do
  right = right and redis.call('HEXISTS', KEYS[2], ARGV[i]) == 0
end
if not right then return {0, read_user(KEYS[1]), read_lines(KEYS[2], 5, 4 + guessed)} end
local at = 5 + guessed
while at <= #ARGV do
  local size = tonumber(ARGV[at])
  local name, key = ARGV[at + 1], KEYS[tonumber(ARGV[at + 2])]
  if name == 'DOCUMENTS' then
    documents(KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], ARGV[at + 3])
  elseif name == 'SCORES' then
    scores(KEYS[2], ARGV[at + 3])
  elseif name == 'HIT' then
    hit(key, KEYS[tonumber(ARGV[at + 3])], unpack(ARGV, at + 4, at + size))
  else
    redis.call(name, key, unpack(ARGV, at + 3, at + size))
  end
  at = at + size + 1
end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'version', ARGV[2]) end
return {1}
"""
)
"""Carry out commands if the user's version still is ARGV[1]; it becomes ARGV[2] then.

KEYS begin with those that `_Commands` names. ARGV[4] document keys follow that the change was guessed for; the first
ARGV[3] of them must not be in the hash KEYS[2], or nothing happens either. Then the commands: each is a count, its
name, the number of its key in KEYS, and its arguments; DOCUMENTS, SCORES and HIT are the functions above.
The answer begins with 1 when it was done; else it tells what a right guess would have begun with.
A client sends a script again when the answer to it got lost: the version then is ARGV[2] already, and all is done.
"""

SWAP = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""


COUNT = """
local lengths = {}
for i = 1, #KEYS do lengths[i] = redis.call('HLEN', KEYS[i]) end
return table.concat(lengths, ' ')
"""
"""KEYS: the hits of copies, all of one user."""
