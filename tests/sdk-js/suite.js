// What every file of the suite starts from: sandboxes that carry this run's label and are gone when their file ends.
import { after, test } from 'node:test'
import { randomUUID } from 'node:crypto'
import { Sandbox } from 'e2b'

export const template = process.env.AENV_TEMPLATE || 'base'
export const label = { suite: 'sdk-js', run: randomUUID() }

const missing = ['E2B_API_URL', 'E2B_SANDBOX_URL', 'E2B_API_KEY'].filter((name) => !process.env[name])
export const skip = missing.length > 0 && `Skipped: no running AgentENV (${missing.join(', ')} not set)`

const made = []

/** Starts a sandbox that is killed at the end of the file. */
export async function start(opts = {}) {
  const { metadata, ...rest } = opts
  const box = await Sandbox.create(template, { timeoutMs: 900_000, ...rest, metadata: { ...label, ...metadata } })
  made.push(box.sandboxId)
  return box
}

after(async () => {
  await Promise.all(made.map((id) => Sandbox.kill(id)))
})

let shared
/** The one sandbox that the tests of a file share. */
export function sandbox() {
  shared ??= start()
  return shared
}

/** A directory of a test's own in the shared sandbox. */
export async function folder() {
  const box = await sandbox()
  const path = `/home/user/${randomUUID().slice(0, 8)}`
  await box.files.makeDir(path)
  return [box, path]
}

/** A test with a bound: a hang is a failure. */
export function check(name, body, timeout = 180_000) {
  test(name, { skip, timeout }, body)
}

/** Asks until the answer is truthy; for states the API has no event for. */
export async function eventually(question, within = 30_000) {
  const deadline = Date.now() + within
  for (;;) {
    const answer = await question()
    if (answer) return answer
    if (Date.now() > deadline) throw new Error(`not within ${within} ms: ${question}`)
    await new Promise((resolve) => setTimeout(resolve, 200))
  }
}

/** A promise with its ends outside. */
export function signal() {
  let resolve
  const promise = new Promise((done) => (resolve = done))
  return { promise, resolve }
}
