-- SWEEP: pub chunk -> looked, closed, wrapped
-- Walks the lanes from a cursor that all workers share, so that an abort key or a deadline takes
-- effect on jobs that no worker looks at.
local chunk = int(ARGV[2])
if #ARGV ~= 2 or not chunk or chunk == 0 then return usage('pub chunk') end

local CONSUMER_IDLE_MS = 3600 * 1000
local meta = tag .. ':meta'
local looked, closed, wrapped = 0, 0, false

local function look(lane, entry, id)
  looked = looked + 1
  local job = load(id)
  if not is_live(job) or job.lane ~= lane or job.entry ~= entry then
    drop(lane, entry)
  elseif gate(job) then
    closed = closed + 1
  end
end

-- Consumers of workers that are gone. One with pending entries must stay, or these are lost.
local function forget_consumers(lane)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', lane_key(lane), GROUP)
  if failure(consumers) then return end
  for _, pairs_list in ipairs(consumers) do
    local consumer = {}
    for i = 1, #pairs_list, 2 do consumer[pairs_list[i]] = pairs_list[i + 1] end
    if consumer.pending == 0 and consumer.idle > CONSUMER_IDLE_MS then
      redis.call('XGROUP', 'DELCONSUMER', lane_key(lane), GROUP, consumer.name)
    end
  end
end

local cursor = redis.call('HMGET', meta, 'sweep_lane', 'sweep_from')
local at, from = 1, cursor[2] or '-'
for i, lane in ipairs(LANES) do
  if lane == cursor[1] then at = i end
end

while looked < chunk and not wrapped do
  local entries = redis.call('XRANGE', lane_key(LANES[at]), from, '+', 'COUNT', chunk - looked)
  for _, entry in ipairs(entries) do
    look(LANES[at], entry[1], entry[2][2])
    from = '(' .. entry[1]
  end
  if looked < chunk then
    at, from = at + 1, '-'
    if at > #LANES then at, wrapped = 1, true end
  end
end

write_first()
redis.call('HSET', meta, 'sweep_lane', LANES[at], 'sweep_from', from)
if wrapped then
  for _, lane in ipairs(LANES) do forget_consumers(lane) end
end
return answer({looked, closed, wrapped and 1 or 0})
