// Commands and terminals.
import assert from 'node:assert/strict'
import { AuthenticationError, CommandExitError, InvalidArgumentError, NotFoundError, TimeoutError } from 'e2b'
import { check, eventually, sandbox, signal } from './suite.js'

const fails = (code) => (error) => {
  assert.ok(error instanceof CommandExitError, error)
  assert.equal(error.exitCode, code)
  return true
}

check('output kinds are kept apart and pushed', async () => {
  const box = await sandbox()
  const out = []
  const err = []
  const result = await box.commands.run('echo a; echo b >&2; printf ü漢', {
    onStdout: (text) => void out.push(text),
    onStderr: (text) => void err.push(text),
  })
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['a\nü漢', 'b\n', 0])
  assert.deepEqual([out.join(''), err.join('')], ['a\nü漢', 'b\n'])
})

check('output comes while the command runs', async () => {
  const box = await sandbox()
  const times = []
  await box.commands.run('echo 1; sleep 2; echo 2', { onStdout: () => void times.push(Date.now()) })
  assert.ok(times[1] - times[0] > 1500)
})

check('a failing command rejects with its code and output', async () => {
  const box = await sandbox()
  for (const code of [1, 42, 255]) {
    await assert.rejects(box.commands.run(`echo said; exit ${code}`), (error) => {
      assert.equal(error.stdout, 'said\n')
      return fails(code)(error)
    })
  }
})

check('code runs in python', async () => {
  const box = await sandbox()
  await box.files.write('/tmp/snippet.py', 'print(sum(range(101)))')
  assert.equal((await box.commands.run('python3 /tmp/snippet.py')).stdout, '5050\n')
})

check('users, directory and environment', async () => {
  const box = await sandbox()
  assert.equal((await box.commands.run('id -un; pwd')).stdout, 'user\n/home/user\n')
  assert.equal((await box.commands.run('id -un; echo $HOME', { user: 'root' })).stdout, 'root\n/root\n')
  assert.equal((await box.commands.run('pwd; printf %s "$A"', { cwd: '/tmp', envs: { A: 'x "y" $z' } })).stdout, '/tmp\nx "y" $z')
  await assert.rejects(box.commands.run('true', { user: 'ghost' }), (error) => {
    assert.ok(error instanceof AuthenticationError, error)
    assert.match(error.message, /ghost/)
    return true
  })
  await assert.rejects(box.commands.run('true', { cwd: '/no/such' }), InvalidArgumentError)
})

check('a background command is listed, waited for and killed', async () => {
  const box = await sandbox()
  const begun = signal()
  const command = await box.commands.run('echo begun; sleep 600', {
    background: true,
    timeoutMs: 0,
    onStdout: (text) => text.includes('begun') && begun.resolve(),
  })
  assert.ok((await box.commands.list()).some((process) => process.pid === command.pid))
  const outcome = assert.rejects(command.wait(), CommandExitError)
  await begun.promise
  assert.equal(await command.kill(), true)
  await outcome
  assert.equal(command.stdout, 'begun\n')
  assert.equal(await box.commands.kill(4194000), false)
})

check('a dropped stream loses neither output nor exit code', async () => {
  const box = await sandbox()
  const command = await box.commands.run('sleep 2; seq 1 500; exit 7', { background: true })
  await command.disconnect()
  const again = await box.commands.connect(command.pid)
  await assert.rejects(again.wait(), fails(7))
  assert.equal(again.stdout, Array.from({ length: 500 }, (_, n) => `${n + 1}\n`).join(''))
})

check('connecting to an unknown process is not found', async () => {
  const box = await sandbox()
  await assert.rejects(box.commands.connect(4194000), NotFoundError)
})

check('input is sent and ended', async () => {
  const box = await sandbox()
  const command = await box.commands.run('cat', { background: true, stdin: true })
  await box.commands.sendStdin(command.pid, 'one\n')
  await command.sendStdin(new TextEncoder().encode('漢字\n'))
  await command.closeStdin()
  assert.equal((await command.wait()).stdout, 'one\n漢字\n')
})

check('a command that takes too long is ended', async () => {
  const box = await sandbox()
  await assert.rejects(box.commands.run('sleep 4321', { timeoutMs: 2000 }), TimeoutError)
  await eventually(async () => !(await box.commands.list()).some((process) => process.args.includes('sleep 4321')))
})

check('ten megabytes of output arrive whole', async () => {
  const box = await sandbox()
  const result = await box.commands.run(`python3 -c "import sys
for i in range(655360): sys.stdout.write('%015d\\n' % i)"`, { timeoutMs: 150_000 })
  assert.equal(result.stdout.length, 10 << 20)
  for (const line of [0, 1, 327_680, 655_359]) {
    assert.equal(result.stdout.slice(line * 16, line * 16 + 16), `${line}`.padStart(15, '0') + '\n')
  }
})

check('twenty commands at once each get their own output', async () => {
  const box = await sandbox()
  const numbers = Array.from({ length: 20 }, (_, n) => n)
  const results = await Promise.all(numbers.map((n) => box.commands.run(`sleep 0.5; echo ${n}`, { timeoutMs: 120_000 })))
  assert.deepEqual(results.map((result) => result.stdout), numbers.map((n) => `${n}\n`))
})

check('a terminal: size, keys, resize, exit', async () => {
  const box = await sandbox()
  let screen = ''
  const waiting = new Map()
  const shows = (text) => {
    const { promise, resolve } = signal()
    waiting.set(text, resolve)
    look()
    return promise
  }
  const look = () => waiting.forEach((resolve, text) => screen.includes(text) && resolve())
  const terminal = await box.pty.create({
    cols: 133,
    rows: 37,
    timeoutMs: 150_000,
    onData: (data) => {
      screen += new TextDecoder().decode(data)
      look()
    },
  })
  const type = (text) => box.pty.sendInput(terminal.pid, new TextEncoder().encode(text))
  await type('stty size; echo $((6*7))-answer; tty\n')
  await shows('37 133')
  await shows('42-answer')
  await shows('/dev/pts/')
  await box.pty.resize(terminal.pid, { cols: 150, rows: 50 })
  await type('stty size\n')
  await shows('50 150')
  await type('exit 9\n')
  await assert.rejects(terminal.wait(), fails(9))
})

check('a terminal can be killed', async () => {
  const box = await sandbox()
  const terminal = await box.pty.create({ cols: 80, rows: 24, onData: () => {}, timeoutMs: 100_000 })
  const outcome = assert.rejects(terminal.wait())
  assert.equal(await box.pty.kill(terminal.pid), true)
  await outcome
})
