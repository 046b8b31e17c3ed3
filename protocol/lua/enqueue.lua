-- ENQUEUE: pub id spec lane deadline_ms cap retention_ms replay_ms max_bytes
-- -> ok STATE | dup STATE | full DEPTH | bad_id | too_large
-- An ACL gives submitters HGET HSET XADD XLEN TIME and nothing else that is called here.
local id, spec, lane = ARGV[2], ARGV[3], ARGV[4]
local deadline_ms, cap, retention_ms = int(ARGV[5]), int(ARGV[6]), int(ARGV[7])
local replay_ms, max_bytes = int(ARGV[8]), int(ARGV[9])
if #ARGV ~= 9 or not (deadline_ms and cap and retention_ms and replay_ms and max_bytes)
  or retention_ms == 0 or replay_ms == 0 then
  return usage('pub id spec lane deadline_ms cap retention_ms replay_ms max_bytes')
end
if not valid_id(id) then return {'bad_id'} end
if not valid_lane(lane) then return {'bad_id'} end
if #spec > math.min(max_bytes, MAX_SPEC_BYTES) then return {'too_large'} end

-- guard dup
local state = redis.call('HGET', job_key(id), 'state')
if state then return {'dup', state} end
-- end guard

local depth = 0
for _, name in ipairs(LANES) do depth = depth + redis.call('XLEN', lane_key(name)) end
if cap > 0 and depth >= cap then return {'full', depth} end

local entry = redis.call('XADD', lane_key(lane), '*', 'id', id)
redis.call('HSET', job_key(id), 'spec', spec, 'state', 'queued', 'lane', lane, 'entry', entry,
  'created', now, 'deadline', deadline_ms > 0 and now + deadline_ms or 0,
  'retention', retention_ms, 'replay', replay_ms, 'attempt', 0, 'seq', 0, 'tokens', 0)
ring()
return answer({'ok', 'queued'})
