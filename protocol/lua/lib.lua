-- Shared part of the eight scripts: `script(name)` in scripts.py puts it in front of each.
-- A guard is what stands between `-- guard NAME` and `-- end guard`; the model test cuts them out.

local publish, tag = ARGV[1], string.match(KEYS[1] or '', '^{mlxq:[A-Za-z0-9_.%-]+}')
if not tag or (publish ~= 'PUBLISH' and publish ~= 'SPUBLISH') then
  return redis.error_reply(
    'ERR mlxq: KEYS[1] must begin with {mlxq:QUEUE}, ARGV[1] be PUBLISH or SPUBLISH')
end

-- No queue takes a larger spec: a TAKE reply of many of them would outgrow a worker.
local MAX_SPEC_BYTES = 16 * 2 ^ 20

local DONE, REPEATED, FENCED, ABORTED, EXPIRED, GAP, BROKEN = 1, 2, -1, -2, -3, -4, -5
local LANES = {'high', 'normal', 'low'}
local GROUP = 'workers'
-- Fields of the job hash, texts before numbers. FIRST is what every event needs.
local FIRST, FIRST_TEXTS = {'state', 'lane', 'entry', 'owner',
  'attempt', 'begun', 'seq', 'deadline'}, 4
local REST, REST_TEXTS = {'by', 'lease', 'tokens', 'base', 'crashes', 'strikes', 'silent',
  'releases', 'retention', 'replay'}, 1

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function usage(text)
  return redis.error_reply('ERR mlxq: bad arguments, expected ' .. text)
end

-- A whole number >= 0, or nil. Lua writes no more than 14 digits out in full.
local function int(text)
  return text and #text <= 14 and string.match(text, '^%d+$') and tonumber(text) or nil
end

local function lane_key(lane) return tag .. ':jobs:' .. lane end
local function job_key(id) return tag .. ':job:' .. id end
local function events_key(id) return tag .. ':events:' .. id end
local function abort_key(id) return tag .. ':abort:' .. id end

local function valid_id(id)
  return id and #id >= 1 and #id <= 64 and not string.find(id, '[^A-Za-z0-9_%-]')
end

-- A full server refuses only the first write of a script. Called where that must not happen.
local function write_first()
  redis.call('HDEL', tag .. ':meta', '')
end

local function has(text, part)
  return string.find(text, part, 1, true) ~= nil
end

-- The text of an error reply, or nil.
local function failure(reply)
  return type(reply) == 'table' and reply.err and tostring(reply.err) or nil
end

local function valid_entry(entry)
  local ms, count = string.match(entry or '', '^(%d+)-(%d+)$')
  return ms and #ms < 20 and #count < 20
end

local function valid_lane(lane)
  return lane == 'high' or lane == 'normal' or lane == 'low'
end

-- Reads fields of the hash into the job; the first `texts` are texts. False: its key has no hash.
local function fill(job, fields, texts)
  local values = redis.pcall('HMGET', job_key(job.id), unpack(fields))
  if failure(values) then return false end
  for i, name in ipairs(fields) do
    local value = values[i]
    if i <= texts then
      job[name] = value or nil
    else
      -- As `int`, with a digit to spare for counting on, and faster: this runs for every event.
      local number = tonumber(value or '')
      local whole = number and number >= 0 and number < 1e13 and number % 1 == 0
      job[name] = whole and number + 0 or 0
    end
  end
  return true
end

-- Reads the other fields when one of them is asked for: most events need none.
local lazy = {}
function lazy.__index(job, name)
  setmetatable(job, nil)
  local rest = {id = job.id}
  fill(rest, REST, REST_TEXTS)
  for field, value in pairs(rest) do
    if job[field] == nil then job[field] = value end
  end
  return job[name]
end

-- The job's fields; state is nil when there is no such job. A hash that no script has written is no
-- job either: submitters can write to hashes, and one of them must not stop a call for all.
local function load(id)
  local job = {id = id}
  local sound = fill(job, FIRST, FIRST_TEXTS) and valid_id(id) and valid_lane(job.lane)
    and valid_entry(job.entry)
  if not sound then return {id = id} end
  return setmetatable(job, lazy)
end

local function spec_of(id)
  return redis.call('HGET', job_key(id), 'spec') or ''
end

local function is_live(job)
  return job.state == 'queued' or job.state == 'running'
end

-- What readers are sent. It goes out last, so that nothing is seen that is not stored.
local pushes = {}
local function answer(reply)
  for _, push in ipairs(pushes) do redis.call(publish, push[1], push[2]) end
  return reply
end

-- Stores one event under the next id. False when the transcript refuses: it contradicts the hash.
local function append(job, json)
  local id = job.attempt .. '-' .. (job.seq + 1)
  local err = failure(redis.pcall('XADD', events_key(job.id), id, 'e', json))
  if err then
    if has(err, 'XADD') or has(err, 'WRONGTYPE') then return false end
    error({err = err})
  end
  job.seq = job.seq + 1
  pushes[#pushes + 1] = {tag .. ':live:' .. job.id, '{"id":"' .. id .. '",' .. string.sub(json, 2)}
  return true
end

local function drop(lane, entry)
  -- guard own_entry
  redis.call('XACK', lane_key(lane), GROUP, entry)
  redis.call('XDEL', lane_key(lane), entry)
  -- end guard
end

-- The terminal event is stored: the job leaves its lane and begins to expire.
local function settle(job, state, terminal, by, replay)
  job.state = state
  redis.call('HSET', job_key(job.id), 'state', state, 'seq', job.seq, 'tokens', job.tokens,
    'terminal', terminal, 'finished', now, 'by', by)
  redis.call('HDEL', job_key(job.id), 'owner')
  drop(job.lane, job.entry)
  redis.call('PEXPIRE', job_key(job.id), job.retention)
  redis.call('PEXPIRE', events_key(job.id), replay)
end

-- A script ends the job. DEL comes first, so that a full server does not refuse: see write_first.
local function close(job, state, terminal)
  redis.call('DEL', abort_key(job.id))
  if not append(job, terminal) then
    redis.call('DEL', events_key(job.id))
    append(job, terminal)
  end
  settle(job, state, terminal, '', job.retention)
end

-- What is known of a job that no worker ends: its first event has the length of the prompt.
local function usage_of(job)
  local first = redis.pcall('XRANGE', events_key(job.id), '-', '+', 'COUNT', 1)[1]
  local prompt = first and string.match(first[2][2], '"prompt_tokens":(%d+)')
  local known = prompt and string.format('"prompt_tokens":%s,', prompt) or ''
  return string.format('{%s"completion_tokens":%d}', known, job.tokens)
end

local function close_aborted(job)
  close(job, 'done', string.format(
    '{"type":"done","finish_reason":"aborted","attempts":%d,"usage":%s}',
    job.attempt, usage_of(job)))
end

local function close_failed(job, code, message, retryable)
  close(job, 'failed', string.format(
    '{"type":"failed","code":"%s","message":"%s","retryable":%s,' ..
    '"attempts":%d,"usage":%s}',
    code, message, tostring(retryable), job.attempt, usage_of(job)))
end

local function close_broken(job)
  close_failed(job, 'internal', 'the stored transcript contradicts the job', true)
  return BROKEN
end

-- Closes a job that was aborted or is past its deadline, and says so.
local function gate(job)
  -- guard gate
  if redis.call('EXISTS', abort_key(job.id)) == 1 then
    close_aborted(job)
    return ABORTED
  end
  if job.deadline > 0 and now >= job.deadline then
    close_failed(job, 'deadline_exceeded', 'the deadline passed before the job was finished', true)
    return EXPIRED
  end
  -- end guard
  return nil
end

local function is_owned(job, owner, attempt)
  -- guard fence
  if job.state ~= 'running' or job.attempt ~= attempt or job.owner ~= owner then return false end
  -- end guard
  return true
end

-- The owner of this attempt has spoken, so its silence will count as a crash.
local function receipt(job)
  if job.begun == job.attempt then return end
  write_first()
  redis.call('HSET', job_key(job.id), 'begun', job.attempt)
end

-- A token stored in the attempt clears the job of suspicion.
local function clear(job)
  if job.tokens > job.base then job.strikes = 0 end
end

-- The worker died under the job: one strike, unless the attempt had stored a token.
local function charge(job)
  job.crashes = job.crashes + 1
  job.strikes = job.strikes + 1
  clear(job)
end

-- Sets the idle time of a pending entry back to 0, or as `...` says. Never FORCE: what is no longer
-- pending must not come back. Without a group nothing is pending; TAKE makes one.
local function claim(lane, entry, owner, ...)
  local reply = redis.pcall('XCLAIM', lane_key(lane), GROUP, owner, 0, entry, 'JUSTID', ...)
  local err = failure(reply)
  if err and not has(err, 'NOGROUP') then error({err = err}) end
end

-- Makes a pending entry claimable at once, whatever the lease of the claimer.
local function offer(lane, entry, owner)
  claim(lane, entry, owner, 'TIME', 1)
end

local function ring()
  redis.call('XADD', tag .. ':bell', 'MAXLEN', 1, '*', 'ring', 1)
end
