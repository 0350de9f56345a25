// Core tests of the npm client `e2b`, run by tests/sdk/test_clients.py against a live gateway.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { after, before, test } from 'node:test'

import { AuthenticationError, CommandExitError, Sandbox, SandboxNotFoundError } from 'e2b'

const template = process.env.TEMPLATE
const { version } = JSON.parse(readFileSync('node_modules/e2b/package.json', 'utf8'))
const sandboxes = []
let sandbox

async function create(source, options = {}) {
  const created = await Sandbox.create(source, { timeoutMs: 600_000, ...options })
  sandboxes.push(created)
  return created
}

before(async () => {
  sandbox = await create(template, { metadata: { team: 'red' }, envs: { GREETING: 'hello' } })
})

after(async () => {
  await Promise.all(sandboxes.map((each) => each.kill()))
})

test('a sandbox is created, listed and connected', async (t) => {
  t.diagnostic(`e2b ${version}, node ${process.versions.node}`)
  assert.equal(await sandbox.isRunning(), true)
  const info = await sandbox.getInfo()
  assert.deepEqual([info.sandboxId, info.state, info.metadata], [sandbox.sandboxId, 'running', { team: 'red' }])
  const listed = await Sandbox.list({ query: { metadata: { team: 'red' } } }).nextItems()
  assert.ok(listed.some((each) => each.sandboxId === sandbox.sandboxId))
  const connected = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await connected.commands.run('echo here')).stdout, 'here\n')
})

test('commands return their output and exit code', async () => {
  const result = await sandbox.commands.run('echo "$GREETING"; echo problem >&2; pwd', { cwd: '/etc' })
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['hello\n/etc\n', 'problem\n', 0])
  await assert.rejects(sandbox.commands.run('exit 7'), (error) => {
    return error instanceof CommandExitError && error.exitCode === 7
  })
  const handle = await sandbox.commands.run('read word; echo "got $word"', { background: true, stdin: true })
  await sandbox.commands.sendStdin(handle.pid, 'one\n')
  assert.equal((await handle.wait()).stdout, 'got one\n')
})

test('files are written, read, listed and removed', async () => {
  await sandbox.files.write('/tmp/d/note', 'héllo')
  assert.equal(await sandbox.files.read('/tmp/d/note'), 'héllo')
  assert.deepEqual((await sandbox.files.list('/tmp/d')).map((each) => each.name), ['note'])
  const bytes = new Uint8Array(5_000_000).map((_, index) => index % 251)
  await sandbox.files.write('/tmp/d/large', new Blob([bytes]))
  assert.deepEqual(Buffer.from(await sandbox.files.read('/tmp/d/large', { format: 'bytes' })), Buffer.from(bytes))
  await sandbox.files.remove('/tmp/d')
  assert.equal(await sandbox.files.exists('/tmp/d'), false)
})

test('a paused sandbox resumes with its files', async () => {
  await sandbox.files.write('/root/note', 'kept')
  assert.equal(await sandbox.pause(), true)
  assert.equal((await sandbox.getInfo()).state, 'paused')
  await sandbox.connect()
  assert.equal(await sandbox.files.read('/root/note'), 'kept')
})

test('a snapshot starts sandboxes and can be deleted', async () => {
  await sandbox.files.write('/root/note', 'before')
  const snapshot = await sandbox.createSnapshot()
  await sandbox.files.write('/root/note', 'after')
  const listed = await sandbox.listSnapshots().nextItems()
  assert.deepEqual(listed.map((each) => each.snapshotId), [snapshot.snapshotId])
  const copy = await create(snapshot.snapshotId)
  assert.equal(await copy.files.read('/root/note'), 'before')
  await copy.kill()
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
})

test('forks are independent copies', async () => {
  await sandbox.files.write('/root/note', 'shared')
  const forks = await sandbox.fork({ count: 2 })
  sandboxes.push(...forks)
  for (const [number, fork] of forks.entries()) {
    assert.equal(await fork.files.read('/root/note'), 'shared')
    await fork.files.write('/root/note', String(number))
  }
  assert.deepEqual(await Promise.all(forks.map((fork) => fork.files.read('/root/note'))), ['0', '1'])
  assert.equal(await sandbox.files.read('/root/note'), 'shared')
})

test('a killed sandbox is gone', async () => {
  assert.equal(await sandbox.kill(), true)
  assert.equal(await sandbox.kill(), false)
  await assert.rejects(sandbox.getInfo(), SandboxNotFoundError)
})

test('a wrong key is refused', async () => {
  await assert.rejects(Sandbox.create(template, { apiKey: 'e2b_00' }), AuthenticationError)
})
