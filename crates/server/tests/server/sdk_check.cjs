// What the control plane owes the JavaScript SDK. Exits non-zero at the first difference.
const assert = require('node:assert')
const e2b = require('e2b')
const { Sandbox } = e2b

async function main() {
  const made = await Sandbox.create('base', { timeoutMs: 120_000, metadata: { run: 'a=b&c d/é%' }, envs: { A: '1' } })
  assert.ok(made.getHost(3000).startsWith(`3000-${made.sandboxId}.box.test`))
  const info = await made.getInfo()
  assert.deepStrictEqual([info.sandboxId, info.cpuCount, info.memoryMB, info.state], [made.sandboxId, 2, 512, 'running'])
  assert.deepStrictEqual(info.metadata, { run: 'a=b&c d/é%' })
  assert.ok(info.startedAt instanceof Date && !Number.isNaN(info.startedAt.valueOf()))

  const others = []
  for (let n = 0; n < 3; n++) others.push(await Sandbox.create('base', { timeoutMs: 60_000 }))
  const pages = Sandbox.list({ limit: 2 })
  const seen = []
  while (pages.hasNext) seen.push(...(await pages.nextItems()).map((item) => item.sandboxId))
  assert.deepStrictEqual(seen, [made, ...others].reverse().map((box) => box.sandboxId))
  const found = await Sandbox.list({ query: { metadata: { run: 'a=b&c d/é%' }, state: ['running', 'paused'] } }).nextItems()
  assert.deepStrictEqual(found.map((item) => item.sandboxId), [made.sandboxId])

  assert.strictEqual(await made.isRunning(), true)
  await made.setTimeout(300_000)
  assert.strictEqual((await made.getMetrics()).length, 1)
  assert.notStrictEqual(await Sandbox.pause(made.sandboxId), false)
  assert.strictEqual(await Sandbox.pause(made.sandboxId), false)
  assert.strictEqual((await made.getInfo()).state, 'paused')
  const again = await Sandbox.connect(made.sandboxId, { timeoutMs: 60_000 })
  assert.strictEqual(again.sandboxId, made.sandboxId)
  const url = await made.downloadUrl('a/b.txt')
  assert.strictEqual((await fetch(url)).status, 200)

  assert.strictEqual(await Sandbox.kill(made.sandboxId), true)
  assert.strictEqual(await Sandbox.kill(made.sandboxId), false)
  assert.strictEqual(await made.isRunning(), false)
  await assert.rejects(made.getInfo(), e2b.NotFoundError)
  await assert.rejects(Sandbox.create('no-such-template'), /404.*does not exist/)
  await assert.rejects(Sandbox.create('base', { timeoutMs: 1e10 }), /timeout/)
  await assert.rejects(Sandbox.create('base', { apiKey: 'e2b_' + '0'.repeat(40) }), e2b.AuthenticationError)
  await assert.rejects(made.commands.run('true'), e2b.SandboxNotFoundError)
}
main().then(() => process.exit(0), (error) => { console.error(error); process.exit(1) })
