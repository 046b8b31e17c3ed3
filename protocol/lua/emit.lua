-- EMIT: pub owner (id attempt seq tokens json)* -> one status per item, in order
local owner = ARGV[2]
local complete = owner and #ARGV % 5 == 2
for i = 3, #ARGV, 5 do
  complete = complete and int(ARGV[i + 1]) and int(ARGV[i + 2]) and int(ARGV[i + 3])
end
if not complete then return usage('pub owner (id attempt seq tokens json)*') end

local function emit(job, attempt, seq, tokens, json)
  if not is_owned(job, owner, attempt) then return FENCED end
  receipt(job)
  local closed = gate(job)
  if closed then return closed end
  if seq == 0 then return DONE end
  -- guard sequence
  if seq <= job.seq then return REPEATED end
  if seq > job.seq + 1 then return GAP end
  -- end guard
  if not append(job, json) then return close_broken(job) end
  redis.call('HSET', job_key(job.id), 'seq', job.seq, 'tokens', tokens)
  return DONE
end

local statuses = {}
for i = 3, #ARGV, 5 do
  local attempt, seq, tokens = int(ARGV[i + 1]), int(ARGV[i + 2]), int(ARGV[i + 3])
  statuses[#statuses + 1] = emit(load(ARGV[i]), attempt, seq, tokens, ARGV[i + 4])
end
return answer(statuses)
