// Files in every form, watching, signed URLs.
import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { AuthenticationError, FileNotFoundError, FileType, FilesystemEventType, InvalidArgumentError, NotFoundError } from 'e2b'
import { check, folder, signal, start } from './suite.js'

const sha = (data) => createHash('sha256').update(data).digest('hex')

check('text, bytes, blobs and streams come back as they went', async () => {
  const [box, path] = await folder()
  const data = randomBytes(2_000_000)
  const written = await box.files.write(`${path}/text`, 'ü 漢字\n')
  assert.equal(written.path, `${path}/text`)
  assert.equal(await box.files.read(`${path}/text`), 'ü 漢字\n')
  const forms = {
    buffer: data.buffer.slice(data.byteOffset, data.byteOffset + data.length),
    blob: new Blob([data]),
    stream: new Blob([data]).stream(),
  }
  for (const [name, form] of Object.entries(forms)) {
    await box.files.write(`${path}/${name}`, form)
    assert.equal(sha(await box.files.read(`${path}/${name}`, { format: 'bytes' })), sha(data), name)
  }
  const blob = await box.files.read(`${path}/blob`, { format: 'blob' })
  assert.equal(sha(Buffer.from(await blob.arrayBuffer())), sha(data))
  const hash = createHash('sha256')
  for await (const piece of await box.files.read(`${path}/stream`, { format: 'stream' })) hash.update(piece)
  assert.equal(hash.digest('hex'), sha(data))
})

check('compressed and octet-stream uploads arrive whole', async () => {
  const [box, path] = await folder()
  const text = 'repeated '.repeat(100_000)
  for (const opts of [{ gzip: true }, { useOctetStream: true }, { useOctetStream: false }]) {
    await box.files.write(`${path}/x`, text, opts)
    assert.equal(await box.files.read(`${path}/x`, { gzip: true }), text)
  }
})

check('many files in one call', async () => {
  const [box, path] = await folder()
  const files = Array.from({ length: 30 }, (_, n) => ({ path: `${path}/many/${n}`, data: `content ${n}` }))
  const written = await box.files.writeFiles(files)
  assert.deepEqual(written.map((info) => info.path), files.map((file) => file.path))
  assert.equal(await box.files.read(`${path}/many/7`), 'content 7')
})

check('a large file goes both ways whole', async () => {
  const [box, path] = await folder()
  const megabytes = Number(process.env.AENV_BIG_MB || 100)
  const block = randomBytes(1 << 20)
  const sent = createHash('sha256')
  let count = 0
  const source = new ReadableStream({
    pull(controller) {
      if (count === megabytes) return controller.close()
      const piece = Uint8Array.from(block)
      new DataView(piece.buffer).setUint32(0, count++)
      sent.update(piece)
      controller.enqueue(piece)
    },
  })
  await box.files.write(`${path}/big`, source, { useOctetStream: true, requestTimeoutMs: 600_000 })
  const want = sent.digest('hex')
  assert.equal((await box.files.getInfo(`${path}/big`)).size, megabytes << 20)
  const there = await box.commands.run(`sha256sum ${path}/big`, { timeoutMs: 300_000 })
  assert.equal(there.stdout.split(' ')[0], want)
  const back = createHash('sha256')
  const pieces = await box.files.read(`${path}/big`, { format: 'stream', requestTimeoutMs: 600_000 })
  for await (const piece of pieces) back.update(piece)
  assert.equal(back.digest('hex'), want)
}, 900_000)

check('what is missing is not found', async () => {
  const [box, path] = await folder()
  await assert.rejects(box.files.read(`${path}/none`), FileNotFoundError)
  await assert.rejects(box.files.getInfo(`${path}/none`), FileNotFoundError)
  await assert.rejects(box.files.list(`${path}/none`), FileNotFoundError)
  assert.equal(await box.files.exists(`${path}/none`), false)
  await assert.rejects(box.files.read(path), InvalidArgumentError)
})

check('names of all kinds', async () => {
  const [box, path] = await folder()
  const names = ['ü', '漢字 🦀', 'with space', 'a&b=c?d#e', '100%', `quo"te'`, '-dash', 'a+b']
  for (const name of names) {
    await box.files.write(`${path}/${name}`, name)
    assert.equal(await box.files.read(`${path}/${name}`), name)
  }
  assert.deepEqual((await box.files.list(path)).map((entry) => entry.name).sort(), [...names].sort())
})

check('directories: make, list, rename, remove, info', async () => {
  const [box, path] = await folder()
  assert.equal(await box.files.makeDir(`${path}/a/b`), true)
  assert.equal(await box.files.makeDir(`${path}/a/b`), false)
  await box.files.write(`${path}/a/b/x`, '12345')
  const paths = async (depth) => (await box.files.list(path, { depth })).map((entry) => entry.path.slice(path.length)).sort()
  assert.deepEqual(await paths(1), ['/a'])
  assert.deepEqual(await paths(3), ['/a', '/a/b', '/a/b/x'])
  const info = await box.files.getInfo(`${path}/a/b/x`)
  assert.deepEqual([info.type, info.size, info.owner, info.permissions], [FileType.FILE, 5, 'user', '-rw-r--r--'])
  assert.ok(info.modifiedTime instanceof Date && Math.abs(info.modifiedTime - Date.now()) < 60_000)
  const moved = await box.files.rename(`${path}/a`, `${path}/c`)
  assert.deepEqual([moved.path, moved.type], [`${path}/c`, FileType.DIR])
  await box.files.remove(`${path}/c`)
  assert.equal(await box.files.exists(`${path}/c`), false)
  await box.files.remove(`${path}/c`)
})

check('changes of a directory are pushed until the watch is stopped', async () => {
  const [box, path] = await folder()
  const seen = []
  const wrote = signal()
  const ended = signal()
  const watch = await box.files.watchDir(
    path,
    (event) => {
      seen.push([event.name, event.type])
      if (event.type === FilesystemEventType.WRITE) wrote.resolve()
    },
    { timeoutMs: 0, onExit: ended.resolve },
  )
  await box.files.write(`${path}/x`, '1')
  await wrote.promise
  assert.deepEqual(seen[0], ['x', FilesystemEventType.CREATE])
  await watch.stop()
  await ended.promise
  await assert.rejects(box.files.watchDir(`${path}/none`, () => {}), NotFoundError)
})

check('signed URLs move one file, until they expire', async () => {
  const [box, path] = await folder()
  const up = await fetch(await box.uploadUrl(`${path}/ü &x`), {
    method: 'POST',
    body: (() => {
      const form = new FormData()
      form.append('file', new Blob(['sent']), 'ignored')
      return form
    })(),
  })
  assert.equal(up.status, 200)
  const url = await box.downloadUrl(`${path}/ü &x`)
  assert.equal(await (await fetch(url)).text(), 'sent')
  const other = new URL(url)
  other.searchParams.set('path', '/etc/hostname')
  assert.equal((await fetch(other)).status, 401)
  const brief = await box.downloadUrl(`${path}/ü &x`, { useSignatureExpiration: 3 })
  assert.equal((await fetch(brief)).status, 200)
  await new Promise((resolve) => setTimeout(resolve, 4000)) // an expiry is a time, not an event
  const late = await fetch(brief)
  assert.equal(late.status, 401)
  assert.match(await late.text(), /signature is already expired/)
})

check('files survive pause and resume', async () => {
  const box = await start()
  const data = randomBytes(1_000_000)
  await box.files.write('/home/user/x', new Blob([data]))
  await box.pause()
  await box.connect()
  assert.equal(sha(await box.files.read('/home/user/x', { format: 'bytes' })), sha(data))
})

check('files belong to the user who wrote them', async () => {
  const [box, path] = await folder()
  await box.files.write(`${path}/by-root`, 'x', { user: 'root' })
  await box.files.write(`${path}/by-user`, 'x')
  assert.equal((await box.files.getInfo(`${path}/by-root`)).owner, 'root')
  assert.equal((await box.files.getInfo(`${path}/by-user`)).owner, 'user')
  await assert.rejects(box.files.list(path, { user: 'ghost' }), AuthenticationError)
})
