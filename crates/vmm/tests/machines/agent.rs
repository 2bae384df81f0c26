//! The kit as it is shipped: the real agent, reached over a tap in a network namespace. Prints how long each step took
//! (`cargo nextest run -p aenv-vmm -E 'test(agent)' --no-capture`).

use crate::{
    ground::{PATIENCE, skipped},
    qemu_ground::kit,
};
use aenv_vmm::{
    BootSource, Drive, MachineSpec, NetDevice, RestoreSource, Vmm,
    qemu::{Options, Qemu},
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::{
    fs::{self, File},
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

const AGENT: &str = "169.254.0.21:49983";
const MAC: &str = "02:aa:bb:cc:dd:01";
const TAP_MAC: &str = "02:aa:bb:cc:dd:02";
const CLONES: usize = 7;

/// A namespace with a tap, removed on drop.
struct Namespace {
    name: String,
}

impl Namespace {
    fn make(name: String) -> Result<Self, String> {
        run("ip", &["netns", "add", &name])?;
        let made = Self { name };
        let within = |words: &[&str]| run("ip", &[&["-n", &made.name], words].concat());
        within(&["tuntap", "add", "tap0", "mode", "tap"])?;
        within(&["addr", "add", "169.254.0.22/30", "dev", "tap0"])?;
        // The guest's memory holds this address too, so it must be the same for parent and clones.
        within(&["link", "set", "tap0", "address", TAP_MAC, "up"])?;
        // Known beforehand: an ARP request lost while the guest starts is repeated only after a second.
        within(&["neigh", "add", "169.254.0.21", "lladdr", MAC, "dev", "tap0", "nud", "permanent"])?;
        Ok(made)
    }

    fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// Waits until the agent answers `/health`, and returns when that was.
    fn healthy(&self, spec: &MachineSpec) -> Instant {
        let netns = File::open(self.path()).unwrap();
        let waiting = std::thread::spawn(move || {
            move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            let begin = Instant::now();
            while begin.elapsed() < PATIENCE / 4 {
                if let Ok(status) = health()
                    && status.starts_with("HTTP/1.1 2")
                {
                    return Some(Instant::now());
                }
                // A refused connection is answered at once by a guest that is still booting.
                std::thread::sleep(Duration::from_millis(1));
            }
            None
        });
        let console = || fs::read_to_string(spec.dir.join("console.log")).unwrap_or_default();
        waiting.join().unwrap().unwrap_or_else(|| panic!("the agent never answered; console:\n{}", console()))
    }
}

fn health() -> std::io::Result<String> {
    let address: SocketAddr = AGENT.parse().unwrap();
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_millis(200))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = run("ip", &["netns", "del", &self.name]);
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output =
        Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
    }
}

fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Proportional set size in KiB, from proc_pid_smaps(5).
fn pss(pid: i32) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = smaps.lines().find(|line| line.starts_with("Pss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

struct Scene {
    dir: tempfile::TempDir,
    kit: PathBuf,
    qemu: Qemu,
    /// Of machines that a failure must not leave behind.
    pids: Vec<i32>,
}

impl Scene {
    async fn prepare() -> Result<Self, String> {
        let kit = kit()?;
        let qemu = Qemu::probe(Options::default()).await.map_err(|error| error.to_string())?;
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        // Refused without root or tun: the tier is missing.
        drop(Namespace::make(format!("aenv-probe-{}", std::process::id()))?);
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("tmp")).map_err(|error| error.to_string())?;
        let disk = dir.path().join("root.img");
        let (root, disk) = (root.to_string_lossy(), disk.to_string_lossy());
        run("mke2fs", &["-q", "-t", "ext4", "-d", &root, &disk, "64M"])?;
        Ok(Self { dir, kit, qemu, pids: vec![] })
    }

    fn spec(&self, name: &str) -> (MachineSpec, Namespace) {
        let namespace = Namespace::make(format!("aenv-{name}-{}", std::process::id())).unwrap();
        let dir = self.dir.path().join(name);
        fs::create_dir(&dir).unwrap();
        let disk = self.dir.path().join(format!("{name}.disk"));
        fs::copy(self.dir.path().join("root.img"), &disk).unwrap();
        let net = NetDevice { netns: namespace.path(), tap: "tap0".into(), mac: MAC.into() };
        let spec = MachineSpec {
            id: format!("{name}-{}", std::process::id()),
            vcpus: 1,
            memory_mib: 512,
            drives: vec![Drive { path: disk, read_only: false }],
            net: Some(net),
            dir,
        };
        (spec, namespace)
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for pid in &self.pids {
            let ours = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let ours = String::from_utf8_lossy(&ours).contains(&*self.dir.path().to_string_lossy());
            if let Some(pid) = rustix::process::Pid::from_raw(*pid).filter(|_| ours) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_answers_after_a_boot_and_after_every_restore() {
    let mut scene = match Scene::prepare().await {
        Ok(scene) => scene,
        Err(why) => return skipped(&why),
    };
    let (spec, namespace) = scene.spec("parent");
    let boot = BootSource {
        kernel: scene.kit.join("vmlinux"),
        initramfs: scene.kit.join("initramfs.cpio"),
        cmdline: [
            "aenv.root=/dev/vda",
            "aenv.ip=169.254.0.21/30",
            "aenv.gw=169.254.0.22",
            "aenv.dns=169.254.0.22",
        ]
        .map(str::to_owned)
        .to_vec(),
        memory_file: scene.dir.path().join("memory"),
    };
    let begin = Instant::now();
    let vm = scene.qemu.boot(&spec, &boot).await.unwrap();
    let started = begin.elapsed();
    scene.pids.push(vm.record().pid);
    let healthy = namespace.healthy(&spec) - begin;
    say(&format!("boot: virtual CPU after {started:.1?}, agent after {healthy:.1?}"));
    // A first request has warmed what every clone's first will use.
    let begin = Instant::now();
    vm.pause().await.unwrap();
    let paused = begin.elapsed();
    let begin = Instant::now();
    let from = RestoreSource {
        state: scene.dir.path().join("state"),
        memory_image: boot.memory_file.clone(),
        made_by: scene.qemu.compatibility(),
    };
    vm.save_state(&from.state).await.unwrap();
    let saved = begin.elapsed();
    say(&format!(
        "pause {paused:.1?}, save_state {saved:.1?} for {} bytes",
        fs::metadata(&from.state).unwrap().len()
    ));
    // The clones' disks are what the parent's was at the pause.
    fs::copy(&spec.drives[0].path, scene.dir.path().join("root.img")).unwrap();
    vm.kill().await.unwrap();
    drop(namespace);

    let (mut machines, mut answers) = (Vec::new(), Vec::new());
    for number in 0..CLONES {
        let (spec, namespace) = scene.spec(&format!("clone{number}"));
        let begin = Instant::now();
        let vm = scene.qemu.restore(&spec, &from).await.unwrap();
        let running = begin.elapsed();
        scene.pids.push(vm.record().pid);
        let healthy = namespace.healthy(&spec) - begin;
        answers.push(healthy);
        say(&format!(
            "clone {number}: running after {running:.1?}, agent after {healthy:.1?}, PSS {} KiB",
            pss(vm.record().pid)
        ));
        machines.push((vm, spec, namespace));
    }
    answers.sort_unstable();
    say(&format!("restore to first answer: median {:.1?}", answers[CLONES / 2]));
    // All at once they still answer, each in its own namespace.
    for (_, spec, namespace) in &machines {
        namespace.healthy(spec);
    }
    for (vm, _, namespace) in machines {
        say(&format!("PSS with {CLONES} alive: {} KiB", pss(vm.record().pid)));
        vm.kill().await.unwrap();
        drop(namespace);
    }
}
