// Create, look, list, time out, pause, connect, kill.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { AuthenticationError, NotFoundError, Sandbox, SandboxError, TimeoutError } from 'e2b'
import { check, eventually, label, sandbox, start, template } from './suite.js'

const left = async (box) => (await box.getInfo()).endAt.getTime() - Date.now()
const gone = async (id) => {
  try {
    await Sandbox.getInfo(id)
    return false
  } catch (error) {
    assert.ok(error instanceof NotFoundError, error)
    return true
  }
}

async function all(opts) {
  const pages = Sandbox.list(opts)
  const items = []
  while (pages.hasNext) items.push(...(await pages.nextItems()))
  return items
}

check('a created sandbox runs commands at once', async () => {
  const box = await sandbox()
  assert.equal((await box.commands.run('echo hello')).stdout, 'hello\n')
  assert.equal(await box.isRunning(), true)
})

check('info tells what was asked for', async () => {
  const box = await start({ metadata: { colour: 'grün' }, timeoutMs: 500_000 })
  const info = await box.getInfo()
  assert.equal(info.sandboxId, box.sandboxId)
  assert.equal(info.state, 'running')
  assert.equal(info.metadata.colour, 'grün')
  assert.ok(info.name === template || info.templateId === template)
  const life = info.endAt.getTime() - info.startedAt.getTime()
  assert.ok(life > 495_000 && life < 520_000, `${life}`)
})

check('environment given at create reaches commands', async () => {
  const box = await start({ envs: { COLOUR: 'blue' } })
  assert.equal((await box.commands.run('printf %s $COLOUR')).stdout, 'blue')
  assert.equal((await box.commands.run('printf %s $COLOUR', { envs: { COLOUR: 'red' } })).stdout, 'red')
})

check('set timeout moves the end both ways', async () => {
  const box = await start()
  await box.setTimeout(600_000)
  assert.ok((await left(box)) > 580_000)
  await box.setTimeout(60_000)
  assert.ok((await left(box)) < 65_000)
})

check('a sandbox whose time is up is paused and wakes whole', async () => {
  const box = await start()
  await box.files.write('/dev/shm/x', 'ram')
  await box.setTimeout(1000)
  await eventually(async () => (await box.getInfo()).state === 'paused')
  assert.equal(await box.isRunning(), false)
  const again = await Sandbox.connect(box.sandboxId)
  assert.equal(await again.files.read('/dev/shm/x'), 'ram')
})

check('a sandbox that shall be killed at its end is', async () => {
  const box = await start({ lifecycle: { onTimeout: 'kill' } })
  await box.setTimeout(1000)
  await eventually(() => gone(box.sandboxId))
})

check('pause keeps memory, files and processes, and old handles work after', async () => {
  const box = await start()
  const counting = await box.commands.run('i=0; while true; do i=$((i+1)); echo $i > /dev/shm/count; sleep 0.1; done', {
    background: true,
    timeoutMs: 0,
  })
  counting.wait().catch(() => {})
  await eventually(async () => (await box.commands.run('cat /dev/shm/count || true')).stdout)
  assert.equal(await box.pause(), true)
  assert.equal(await box.pause(), false)
  assert.equal((await box.getInfo()).state, 'paused')
  await box.connect()
  const before = Number((await box.commands.run('cat /dev/shm/count')).stdout)
  await eventually(async () => Number((await box.commands.run('cat /dev/shm/count')).stdout) > before)
  assert.ok((await box.commands.list()).some((process) => process.pid === counting.pid))
})

check('connect extends a life but never shortens it', async () => {
  const box = await start({ timeoutMs: 100_000 })
  await Sandbox.connect(box.sandboxId, { timeoutMs: 400_000 })
  assert.ok((await left(box)) > 380_000)
  await Sandbox.connect(box.sandboxId, { timeoutMs: 10_000 })
  assert.ok((await left(box)) > 370_000)
})

check('kill ends it and says whether there was one', async () => {
  const box = await start()
  assert.equal(await box.kill(), true)
  assert.equal(await box.kill(), false)
  assert.equal(await gone(box.sandboxId), true)
  await assert.rejects(box.commands.run('true'), NotFoundError)
  await assert.rejects(box.commands.list(), TimeoutError)
  await assert.rejects(box.files.read('/etc/hostname'), TimeoutError)
  await assert.rejects(Sandbox.connect(box.sandboxId), NotFoundError)
})

check('killing a sandbox ends the streams of its commands', async () => {
  const box = await start()
  const command = await box.commands.run('sleep 600', { background: true, timeoutMs: 0 })
  const outcome = assert.rejects(command.wait())
  await box.kill()
  await outcome
})

check('an unknown template is told by name', async () => {
  const name = `no-such-${randomUUID().slice(0, 8)}`
  await assert.rejects(Sandbox.create(name), (error) => {
    assert.ok(error instanceof SandboxError, error)
    assert.match(error.message, /does not exist/)
    return true
  })
})

check('a wrong key is refused', async () => {
  await assert.rejects(Sandbox.create(template, { apiKey: 'e2b_' + '0'.repeat(40) }), AuthenticationError)
})

check('lists filter by label and state and cover all pages once', async () => {
  const group = randomUUID()
  const boxes = []
  for (let n = 0; n < 5; n++) boxes.push(await start({ metadata: { group, parity: `${n % 2}`, 'odd key/&=': 'a b&c=d%ü' } }))
  await boxes[0].pause()
  const ids = (items) => items.map((item) => item.sandboxId)
  const metadata = { group }
  assert.deepEqual(ids(await all({ query: { metadata } })), ids(boxes).reverse())
  assert.equal((await all({ query: { metadata: { group, parity: '1' } } })).length, 2)
  assert.equal((await all({ query: { metadata: { group, 'odd key/&=': 'a b&c=d%ü' } } })).length, 5)
  assert.deepEqual(ids(await all({ query: { metadata, state: ['paused'] } })), [boxes[0].sandboxId])
  assert.deepEqual(ids(await all({ query: { metadata }, limit: 2 })).sort(), ids(boxes).sort())
  assert.deepEqual(ids(await all({ query: { metadata }, order: 'asc' })), ids(boxes))
  assert.deepEqual(await all({ query: { metadata: { ...label, group: 'none' } } }), [])
})

check('metrics tell plausible use', async () => {
  const box = await sandbox()
  const samples = await eventually(async () => {
    const found = await box.getMetrics()
    return found.length && found
  }, 60_000)
  const last = samples.at(-1)
  assert.ok(last.memUsed > 0 && last.memUsed < last.memTotal)
  assert.ok(last.diskUsed > 0 && last.diskUsed < last.diskTotal)
})
