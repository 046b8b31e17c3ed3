-- FINISH: pub owner id attempt seq tokens done|failed result json... -> status
-- The last json is the terminal event, those before it the last token events.
local owner, id, attempt, seq, tokens = ARGV[2], ARGV[3], int(ARGV[4]), int(ARGV[5]), int(ARGV[6])
local state, result = ARGV[7], ARGV[8]
if #ARGV < 9 or not (attempt and seq and tokens) or not (state == 'done' or state == 'failed') then
  return usage('pub owner id attempt seq tokens done|failed result json...')
end

local job = load(id)
local by = owner .. '/' .. attempt
-- guard finish_once
if job.by == by and not is_live(job) then return REPEATED end
-- end guard
if not is_owned(job, owner, attempt) then return FENCED end
if seq ~= job.seq + 1 then return GAP end

redis.call('DEL', abort_key(id))
for i = 9, #ARGV do
  if not append(job, ARGV[i]) then return answer(close_broken(job)) end
end
job.tokens = tokens
if result ~= '' then redis.call('HSET', job_key(id), 'result', result) end
settle(job, state, ARGV[#ARGV], by, job.replay)
return answer(DONE)
