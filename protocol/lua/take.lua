-- TAKE: pub owner n lease_ms alone recover max_crashes [lanes]
-- -> bell_id, more, make_room, {id, attempt, seq, tokens, solo, spec, lane}...
-- lanes: how many, from the highest, are asked; all if not given.
local owner, n, lease_ms = ARGV[2], int(ARGV[3]), int(ARGV[4])
local alone, recover, max_crashes = ARGV[5] == '1', ARGV[6] == '1', int(ARGV[7])
local asked = {unpack(LANES, 1, int(ARGV[8] or '3') or 0)}
if (#ARGV ~= 7 and #ARGV ~= 8) or not (n and lease_ms and max_crashes)
  or n == 0 or lease_ms == 0 or #asked == 0 then
  return usage('pub owner n lease_ms alone recover max_crashes [lanes]')
end

local PAGE = 64
local AGING = 8
local MAX_SILENT = 20
-- At most 1,000 entries are looked at. Each search may use up to its mark, so that entries which
-- cannot be taken now (long leases, suspects) never keep the next search from having a share.
local SUSPECTS_MARK, LAPSED_MARK, NEW_MARK = 250, 750, 1000

local meta = tag .. ':meta'
local jobs = {}
local goal = n          -- how many jobs the search that runs may bring the total to
local looked = 0
local settled = 0       -- entries that a further TAKE will not see again
local suspects = 0      -- left for a worker that is empty
local cut_short = false
local only_solo = false -- a suspect was handed out, and comes with nothing else
local aging = false     -- the lowest lane has its turn

-- Whether a job waits in a lane above this one that nobody has taken yet.
local function is_passed(lane)
  for _, above in ipairs(LANES) do
    if above == lane then return false end
    local held = redis.pcall('XPENDING', lane_key(above), GROUP)
    if redis.call('XLEN', lane_key(above)) > (failure(held) and 0 or held[1]) then return true end
  end
end

local function hand_out(job, delivered)
  local solo = job.strikes >= 1
  if not delivered then claim(job.lane, job.entry, owner) end
  if job.seq == 0 then redis.call('DEL', events_key(job.id)) end
  job.attempt = job.attempt + 1
  redis.call('HSET', job_key(job.id), 'state', 'running', 'attempt', job.attempt, 'owner', owner,
    'lease', lease_ms, 'begun', '', 'base', job.tokens, 'taken', now)
  -- A job whose turn has come is not to wait again, in its worker, for those it has passed.
  local lane = aging and is_passed(job.lane) and LANES[1] or job.lane
  jobs[#jobs + 1] = {job.id, job.attempt, job.seq, job.tokens, solo and 1 or 0, spec_of(job.id),
    lane}
  if solo then goal, only_solo = 0, true end
end

-- Takes a running job from its owner, which this alone fences, and counts what the owner owes.
local function requeue(job, kind)
  redis.call('HDEL', job_key(job.id), 'owner')
  local crashed = kind == 'lapsed' and job.owner ~= owner
  -- guard receipt
  if job.begun ~= job.attempt then
    crashed = false
    if kind ~= 'new' then job.silent = job.silent + 1 end
  end
  -- end guard
  if crashed then charge(job) else clear(job) end
  redis.call('HSET', job_key(job.id), 'state', 'queued',
    'crashes', job.crashes, 'strikes', job.strikes, 'silent', job.silent)
end

local function is_dead(job)
  return (job.crashes >= 3 and job.strikes >= 2) or job.crashes >= max_crashes
    or job.silent >= MAX_SILENT
end

local function bury(job, last_owner)
  local reason = string.format('given up: %d workers crashed with it', job.crashes)
  if job.silent >= MAX_SILENT then
    reason = string.format('given up: %d workers took it and never began', job.silent)
  end
  write_first()
  redis.call('XADD', tag .. ':dead', 'MAXLEN', '~', 1000, '*', 'id', job.id,
    'spec', spec_of(job.id),
    'crashes', job.crashes, 'strikes', job.strikes, 'owner', last_owner, 'reason', reason)
  close_failed(job, 'worker_lost', reason, false)
end

-- Decides about one entry. kind: lapsed (idle for our lease or offered), new (just delivered to
-- us), lost (delivered to us by a TAKE whose reply was lost). holder: who had it before.
local function examine(lane, entry, id, kind, idle_ms, holder, only_suspects)
  looked = looked + 1
  local job = load(id)
  local unspoken = job.state == 'running' and job.owner == owner and job.begun ~= job.attempt
  if kind == 'lost' and not unspoken then return end
  -- guard terminal_check
  if not is_live(job) or job.lane ~= lane or job.entry ~= entry then
    drop(lane, entry)
    settled = settled + 1
    return
  end
  -- end guard
  if gate(job) then
    settled = settled + 1
    return
  end
  if job.state == 'running' then
    -- guard lease
    if kind == 'lapsed' and idle_ms < job.lease then return end
    -- end guard
    requeue(job, kind)
  end
  if redis.call('HSTRLEN', job_key(id), 'spec') > MAX_SPEC_BYTES then
    close_failed(job, 'bad_request', 'the job has too many bytes', false)
    settled = settled + 1
  elseif is_dead(job) then
    bury(job, holder)
    settled = settled + 1
  elseif job.strikes >= 1 and not (alone and #jobs == 0) then
    if kind ~= 'lapsed' then offer(lane, entry, owner) end
    suspects = suspects + 1
  elseif job.strikes >= 1 or not only_suspects then
    hand_out(job, kind == 'new')
  end
end

-- One page of a lane's pending list. A missing group is made here: at 0, because what is in a lane
-- is live.
local function pending(lane, filter)
  local page = redis.pcall('XPENDING', lane_key(lane), GROUP, unpack(filter))
  local err = failure(page)
  if not err then return page end
  if not has(err, 'NOGROUP') then error({err = err}) end
  write_first()
  redis.call('XGROUP', 'CREATE', lane_key(lane), GROUP, 0, 'MKSTREAM')
  return {}
end

local function walk_pending(lane, kind, mark, only_suspects)
  local from = '-'
  while true do
    local page
    if kind == 'lost' then
      page = pending(lane, {from, '+', PAGE, owner})
    else
      page = pending(lane, {'IDLE', lease_ms, from, '+', PAGE})
    end
    for _, item in ipairs(page) do
      if #jobs >= goal then return end
      if looked >= mark then
        cut_short = true
        return
      end
      local entry = redis.call('XRANGE', lane_key(lane), item[1], item[1])[1]
      local id = entry and entry[2][2] or ''
      examine(lane, item[1], id, kind, item[3], item[2], only_suspects)
      from = '(' .. item[1]
    end
    if #page < PAGE then return end
  end
end

local function read_new(lane)
  while #jobs < goal do
    local count = math.min(goal - #jobs, NEW_MARK - looked)
    if count <= 0 then
      cut_short = true
      return
    end
    -- A suspect must come with nothing else, so an empty worker reads one by one.
    if alone then count = 1 end
    local reply = redis.call('XREADGROUP', 'GROUP', GROUP, owner, 'COUNT', count,
      'STREAMS', lane_key(lane), '>')
    if not reply or #reply == 0 then return end
    for _, entry in ipairs(reply[1][2]) do
      examine(lane, entry[1], entry[2][2], 'new', 0, owner, false)
    end
  end
end

local function take_from(lane)
  walk_pending(lane, 'lapsed', LAPSED_MARK, false)
  read_new(lane)
end

if recover then
  for _, lane in ipairs(LANES) do walk_pending(lane, 'lost', SUSPECTS_MARK, false) end
end
if alone and #jobs == 0 then
  for _, lane in ipairs(asked) do walk_pending(lane, 'lapsed', SUSPECTS_MARK, true) end
end
-- A TAKE that leaves lanes out has no part in this: none of them could have its turn.
local takes_turns = #asked == #LANES
if not only_solo and takes_turns then
  -- Every 8th job of the queue comes from the lowest lane that has one, so that no lane starves.
  local turn = tonumber(redis.call('HGET', meta, 'turn') or '') or 0
  local aged = math.floor((turn + n) / AGING) - math.floor(turn / AGING)
  goal = math.min(n, #jobs + aged)
  aging = true
  for i = #asked, 1, -1 do take_from(asked[i]) end
  aging = false
end
if not only_solo then
  goal = n
  for _, lane in ipairs(asked) do take_from(lane) end
end
if #jobs > 0 and takes_turns then redis.call('HINCRBY', meta, 'turn', #jobs) end

local make_room = 0
if suspects > 0 then
  local held = redis.call('HMGET', meta, 'solo', 'solo_until')
  local is_held = held[1] and now < (tonumber(held[2] or '') or 0)
  if not is_held then
    write_first()
    redis.call('HSET', meta, 'solo', owner, 'solo_until', now + 2 * lease_ms)
  end
  if not is_held or held[1] == owner then make_room = 1 end
end

-- Another TAKE at once helps only if this one has cleared something away.
local more = cut_short and #jobs < goal and settled > 0
local bell = redis.call('XREVRANGE', tag .. ':bell', '+', '-', 'COUNT', 1)
local reply = {bell[1] and bell[1][1] or '0-0', more and 1 or 0, make_room}
for _, job in ipairs(jobs) do reply[#reply + 1] = job end
return answer(reply)
