-- BEAT: pub owner (id attempt)* -> one status per job, in order
local owner = ARGV[2]
local complete = owner and #ARGV % 2 == 0
for i = 3, #ARGV, 2 do complete = complete and int(ARGV[i + 1]) end
if not complete then return usage('pub owner (id attempt)*') end

local function beat(job, attempt)
  if not is_owned(job, owner, attempt) then return FENCED end
  receipt(job)
  local closed = gate(job)
  if closed then return closed end
  claim(job.lane, job.entry, owner)
  return DONE
end

local statuses = {}
for i = 3, #ARGV, 2 do statuses[#statuses + 1] = beat(load(ARGV[i]), int(ARGV[i + 1])) end
return answer(statuses)
