-- RELEASE: pub owner reason (id attempt)* -> one status per job, in order
-- reason: drain | preempt | no_room (was not admitted) | crash (the engine died)
local owner, reason = ARGV[2], ARGV[3]
local complete = #ARGV % 2 == 1
  and (reason == 'drain' or reason == 'preempt' or reason == 'no_room' or reason == 'crash')
for i = 4, #ARGV, 2 do complete = complete and int(ARGV[i + 1]) end
if not complete then return usage('pub owner drain|preempt|no_room|crash (id attempt)*') end

local rings = false

local function release(job, attempt)
  if not is_owned(job, owner, attempt) then return FENCED end
  local closed = gate(job)
  if closed then return closed end
  redis.call('HDEL', job_key(job.id), 'owner')
  if reason == 'crash' then
    charge(job)
  else
    job.releases = job.releases + 1
    clear(job)
  end
  if reason ~= 'no_room' then
    local event = '{"type":"requeued","reason":"' .. reason .. '"}'
    if not append(job, event) then return close_broken(job) end
    rings = true
  end
  redis.call('HSET', job_key(job.id), 'state', 'queued', 'seq', job.seq,
    'crashes', job.crashes, 'strikes', job.strikes, 'releases', job.releases)
  offer(job.lane, job.entry, owner)
  return DONE
end

local statuses = {}
for i = 4, #ARGV, 2 do statuses[#statuses + 1] = release(load(ARGV[i]), int(ARGV[i + 1])) end
if rings then ring() end
return answer(statuses)
