// Ports of a sandbox from outside: HTTP, events, WebSocket, tokens.
import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { readFile } from 'node:fs/promises'
import WebSocket from 'ws'
import { check, eventually, sandbox, signal } from './suite.js'

const port = 8322
const base = process.env.E2B_SANDBOX_URL

let begun
function served() {
  begun ??= (async () => {
    const box = await sandbox()
    const source = await readFile(new URL('../sdk-python/guest_server.py', import.meta.url), 'utf8')
    await box.files.write('/tmp/guest_server.py', source)
    const command = await box.commands.run(`python3 /tmp/guest_server.py ${port}`, { background: true, timeoutMs: 0 })
    command.wait().catch(() => {}) // ended with its sandbox
    const headers = { 'E2b-Sandbox-Id': box.sandboxId, 'E2b-Sandbox-Port': `${port}` }
    const call = (path, opts = {}) => fetch(base + path, { ...opts, headers: { ...headers, ...opts.headers } })
    await eventually(async () => (await call('/')).status === 200)
    return { box, headers, call }
  })()
  return begun
}

check('the host of a port names port and sandbox', async () => {
  const box = await sandbox()
  assert.ok(box.getHost(port).startsWith(`${port}-${box.sandboxId}.`))
})

check('a server in the sandbox is reached', async () => {
  const { call } = await served()
  assert.equal(await (await call('/health')).text(), 'hello from the guest')
  const teapot = await call('/teapot')
  assert.deepEqual([teapot.status, teapot.headers.get('x-kind')], [418, 'teapot'])
  const data = randomBytes(3_000_000)
  const answer = await call('/', { method: 'POST', body: data })
  assert.equal(await answer.text(), createHash('sha256').update(data).digest('hex'))
})

check('events arrive when they are sent', async () => {
  const { call } = await served()
  const answer = await call('/events')
  const times = []
  const decoder = new TextDecoder()
  for await (const piece of answer.body) {
    for (const line of decoder.decode(piece).split('\n')) if (line.startsWith('data: tick')) times.push(Date.now())
  }
  assert.equal(times.length, 5)
  assert.ok(times[4] - times[0] > 1500)
})

check('a WebSocket echoes text, bytes and large frames', async () => {
  const { headers } = await served()
  const line = new WebSocket(base.replace(/^http/, 'ws'), { headers, maxPayload: 16 << 20 })
  const opened = signal()
  line.on('open', opened.resolve)
  line.on('error', (error) => opened.resolve(error))
  assert.equal(await opened.promise, undefined)
  for (const message of ['ü 漢字', randomBytes(126), randomBytes(65_536), randomBytes(1_000_000)]) {
    const echoed = signal()
    line.once('message', (data, binary) => echoed.resolve(binary ? data : data.toString()))
    line.send(message)
    assert.deepEqual(await echoed.promise, message)
  }
  const closed = signal()
  line.on('close', closed.resolve)
  line.close(1000)
  assert.equal(await closed.promise, 1000)
})

check('without its token a sandbox lets nobody in', async () => {
  const box = await sandbox()
  const headers = { 'E2b-Sandbox-Id': box.sandboxId, 'E2b-Sandbox-Port': '49983' }
  assert.equal((await fetch(base + '/health', { headers })).status, 204)
  for (const token of [undefined, 'wrong']) {
    const tried = token ? { ...headers, 'X-Access-Token': token } : headers
    assert.equal((await fetch(base + '/files?path=/etc/hostname', { headers: tried })).status, 401)
    const rpc = await fetch(base + '/process.Process/List', {
      method: 'POST',
      headers: { ...tried, 'Content-Type': 'application/json' },
      body: '{}',
    })
    assert.equal(rpc.status, 401)
    assert.ok(['unauthenticated', 401].includes((await rpc.json()).code))
  }
})

check('a closed port and an unknown sandbox are told apart', async () => {
  const box = await sandbox()
  const ask = async (id) => {
    const answer = await fetch(base, { headers: { 'E2b-Sandbox-Id': id, 'E2b-Sandbox-Port': '9' } })
    assert.equal(answer.status, 502)
    return (await answer.json()).message
  }
  assert.match(await ask(box.sandboxId), /port is not open/)
  assert.match(await ask('abcdefghij0123456789'), /was not found/)
})
