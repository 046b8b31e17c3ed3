-- ABORT: pub id -> aborted (closed now, whatever the state) | finished | unknown
local id = ARGV[2]
if #ARGV ~= 2 then return usage('pub id') end
if not valid_id(id) then return 'unknown' end

local job = load(id)
if not job.state then
  -- A late ENQUEUE of a submitter that gave up is born doomed.
  redis.call('SET', abort_key(id), 1, 'EX', 60)
  return 'unknown'
end
if not is_live(job) then return 'finished' end
close_aborted(job)
return answer('aborted')
