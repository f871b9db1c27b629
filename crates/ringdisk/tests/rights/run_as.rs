//! `--user`: a process that root started is another user's once it serves, does all the same, and
//! leaves nothing behind; and where it stays root it says why.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ringdisk_testkit::images::{self, assert_clean, pattern, piece};
use ringdisk_testkit::limits::{UringParameter, needs, needs_root, part_needs};
use ringdisk_testkit::model::{BaseRule, FrontEnd, Vm};
use ringdisk_testkit::mount::{Loop, Mounted, for_user, scratch, text};
use ringdisk_testkit::process::{Finished, command, has, run, until};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::common::confined::{assert_confined, children, is_gone, of_threads};
use crate::common::serving::{
    Daemon, ctl as ctl_disk, judge, load, meanwhile, options, serve_command,
};
use crate::common::tools::{Ran, names, ringdisk};
use crate::common::{MIB, open, program};

/// The user and group `nobody`.
const NOBODY: u32 = 65534;
/// Another one.
const OTHER: u32 = 65533;

/// A directory and an image of nobody's, and a place that only root may look into.
struct Place {
    images: TempDir,
    roots: TempDir,
}

impl Place {
    fn new() -> Place {
        let (images, roots) = (scratch(), scratch());
        fs::set_permissions(images.path(), Permissions::from_mode(0o755)).expect("chmod");
        fs::set_permissions(roots.path(), Permissions::from_mode(0o700)).expect("chmod");
        let place = Place { images, roots };
        place.give(place.images.path());
        images::qcow2(&place.image("disk.qcow2"), "8M", "cluster_size=4k");
        place.give(&place.image("disk.qcow2"));
        place
    }

    fn image(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }

    fn root(&self, name: &str) -> PathBuf {
        self.roots.path().join(name)
    }

    fn give(&self, path: &Path) {
        chown(path, Some(NOBODY), Some(NOBODY)).expect("chown");
    }

    /// `ringdisk mount WORDS… disk.qcow2`, with all that it makes where only root may look.
    fn mount(&self, words: &[&str]) -> Mounted {
        let path = self.root("disk");
        Mounted::from_command(&mut self.mount_command(words), &path)
    }

    fn mount_command(&self, words: &[&str]) -> Command {
        let (image, path) = (self.image("disk.qcow2"), self.root("disk"));
        // `Mounted` makes the mountpoint, and here the program shall.
        let first = ["sh", "-c", "rm -f -- \"$0\"; exec \"$@\"", text(&path)];
        let mut all = command(&first);
        all.args([&program(), "mount", "-v"]).args(words).args([&image, &path]);
        all.env("XDG_RUNTIME_DIR", self.roots.path());
        all
    }

    /// `ringdisk serve WORDS…`, likewise.
    fn serve_command(&self, words: &[&str]) -> Command {
        let (image, socket) = (self.image("disk.qcow2"), self.root("socket"));
        let all = [words, &["-v", text(&image), "--vhost-user-blk", text(&socket)]].concat();
        let mut command = serve_command(&all);
        command.env("XDG_RUNTIME_DIR", self.roots.path());
        command
    }

    fn serve(&self, words: &[&str]) -> Daemon {
        Daemon::of(&mut self.serve_command(words))
    }

    fn ctl(&self, target: &str, words: &[&str]) -> Ran {
        let mut all = Command::new(program());
        all.args(["ctl", text(&self.root(target))]).args(words);
        all.env("XDG_RUNTIME_DIR", self.roots.path());
        let Finished { status, stdout, stderr } = run(all);
        Ran { code: status.code().unwrap_or(-1), out: stdout, err: stderr }
    }

    /// The line about the sandbox.
    fn sandbox(&self, target: &str) -> String {
        let stats = self.ctl(target, &["stats", "--json"]).ok().json();
        stats["sandbox"].as_str().expect("in force").to_owned()
    }
}

/// Every thread is that user's, has no other group and no capability.
#[track_caller]
fn assert_is(pid: u32, number: u32) {
    let four = [number.to_string(), number.to_string(), number.to_string(), number.to_string()];
    let wanted = [("Uid", four.join("\t")), ("Gid", four.join("\t")), ("Groups", String::new())];
    let none = ["CapInh", "CapPrm", "CapEff", "CapAmb"].map(|set| (set, "0".repeat(16)));
    for (name, wanted) in wanted.into_iter().chain(none) {
        let values = of_threads(pid, name);
        assert!(values.len() > 1, "{name}: {values:?}");
        assert!(values.iter().all(|value| *value == wanted), "{name} is not {wanted}: {values:?}");
    }
}

#[track_caller]
fn assert_is_root(pid: u32) {
    assert!(of_threads(pid, "Uid").iter().all(|value| value == "0\t0\t0\t0"));
}

fn owner(path: &Path) -> u32 {
    fs::metadata(path).expect("there").uid()
}

fn write(disk: &Path, seed: u64, offset: u64) {
    let file = open(disk);
    let bytes = pattern(seed, offset, 1 << 20);
    file.write_all_at(&bytes, offset).and_then(|()| file.sync_all()).expect("write");
}

#[test]
fn a_mount_is_the_owner_of_its_image_and_does_everything() {
    if !needs_root() {
        return;
    }
    let place = Place::new();
    let pidfile = place.root("pid");
    let [new, copy] = ["new.qcow2", "copy.qcow2"].map(|name| place.image(name));
    fs::write(&copy, "").expect("a name that is allowed");
    let disk =
        place.mount(&["--pidfile", text(&pidfile), "--threads", "2", "--allow-path", text(&copy)]);
    assert_is(disk.pid(), NOBODY);
    assert_confined(disk.pid(), true);
    let helper = children(disk.pid());
    assert_eq!(helper.len(), 1, "the helper process");
    assert!(
        fs::read_to_string(format!("/proc/{}/status", helper[0])).expect("it").contains("Uid:\t0")
    );
    assert!(place.sandbox("disk").contains("capabilities none"), "{}", place.sandbox("disk"));
    assert!(
        place.sandbox("disk").ends_with("user nobody (65534:65534)"),
        "{}",
        place.sandbox("disk")
    );
    write(disk.path(), 1, 0);
    place.ctl("disk", &["snapshot", text(&new)]).ok();
    assert_eq!(owner(&new), NOBODY);
    write(disk.path(), 2, MIB);
    fs::copy(place.image("disk.qcow2"), &copy).expect("copy");
    place.give(&copy);
    place.ctl("disk", &["backing", "-F", "qcow2", text(&copy)]).ok();
    place.ctl("disk", &["commit"]).ok();
    place.ctl("disk", &["resize", "+8M"]).ok();
    write(disk.path(), 3, 12 * MIB);
    place.ctl("disk", &["snapshot", "--internal", "inside"]).ok();
    let mut topology = command(&[&program(), "topology", "--json", disk.text()]);
    topology.env("XDG_RUNTIME_DIR", place.roots.path());
    assert_eq!(run(topology).code(), Some(0));
    disk_prints(&disk);
    for (seed, offset) in [(1, 0), (2, MIB), (3, 12 * MIB)] {
        assert!(piece(disk.path(), offset, 1 << 20) == pattern(seed, offset, 1 << 20));
    }
    // Threads that were started since.
    assert_is(disk.pid(), NOBODY);
    place.ctl("disk", &["stop"]).ok();
    let finished = disk.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert!(!finished.output().contains("WARN"), "{}", finished.output());
    assert!(is_gone(helper[0]));
    assert_eq!(names(place.roots.path()), ["ringdisk"]);
    assert_eq!(names(&place.root("ringdisk")), [""; 0]);
    assert_clean(&copy);
}

/// SIGUSR1 comes through.
fn disk_prints(disk: &Mounted) {
    let pid = Pid::from_raw(i32::try_from(disk.pid()).expect("a pid")).expect("a pid");
    kill_process(pid, Signal::USR1).expect("it runs");
    let said = || disk.output().contains("latency  p50").then_some(());
    assert_eq!(until(Duration::from_secs(10), said), Some(()), "{}", disk.output());
}

#[test]
fn why_it_stays_root_is_told() {
    if !needs_root() {
        return;
    }
    let stays = |place: &Place, words: &[&str], why: &str| {
        let disk = place.mount(words);
        assert_is_root(disk.pid());
        let said = disk.output();
        assert!(said.contains("stays root: ") && said.contains(why), "{why}: {said}");
        let in_force = place.ctl("disk", &["stats", "--json"]).ok().json()["sandbox"].clone();
        let in_force = in_force.as_str().unwrap_or("off").to_owned();
        assert!(in_force == "off" || in_force.contains("stays root: "), "{in_force}");
        assert!(in_force == "off" || in_force.contains(why), "{why}: {in_force}");
        assert_eq!(disk.stop().code(), Some(0));
    };
    let place = Place::new();
    stays(&place, &["--user", "root"], "--user root");
    stays(&place, &["--sandbox", "off"], "--sandbox off");
    // An image below that the owner may not read.
    let base = place.image("base.qcow2");
    fs::rename(place.image("disk.qcow2"), &base).expect("rename");
    let top = place.image("disk.qcow2");
    ringdisk(
        place.images.path(),
        &["create", "-f", "qcow2", "-F", "qcow2", "-b", text(&base), text(&top)],
    )
    .ok();
    stays(&place, &[], "disk.qcow2' belongs to root");
    place.give(&top);
    chown(&base, Some(0), Some(0)).expect("chown");
    fs::set_permissions(&base, Permissions::from_mode(0o600)).expect("chmod");
    stays(&place, &[], "user nobody (65534:65534) may not read");
    fs::set_permissions(&base, Permissions::from_mode(0o644)).expect("chmod");
    // What the directories on the way allow counts.
    fs::set_permissions(place.images.path(), Permissions::from_mode(0o700)).expect("chmod");
    chown(place.images.path(), Some(0), Some(0)).expect("chown");
    stays(&place, &[], "may not write");
    place.give(place.images.path());
    let disk = place.mount(&[]);
    assert_is(disk.pid(), NOBODY);
    // Into another one's image: as it says.
    place.ctl("disk", &["commit"]).ends(6).says("--user root");
    assert_eq!(disk.stop().code(), Some(0));
    fs::set_permissions(&top, Permissions::from_mode(0o400)).expect("chmod");
    stays(&place, &[], "may not write");
}

#[test]
fn an_overlay_where_the_user_may_make_none_is_refused_with_what_helps() {
    if !needs_root() {
        return;
    }
    let place = Place::new();
    chown(place.images.path(), Some(0), Some(0)).expect("chown");
    let new = place.image("new.qcow2");
    let disk = place.mount(&[]);
    assert_is(disk.pid(), NOBODY);
    place.ctl("disk", &["snapshot", text(&new)]).ends(6).says("--user root").says("nobody");
    write(disk.path(), 1, 0);
    assert_eq!(disk.stop().code(), Some(0));
    let disk = place.mount(&["--user", "root"]);
    place.ctl("disk", &["snapshot", text(&new)]).ok();
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn a_user_that_is_named_is_taken_with_and_without_a_sandbox() {
    if !needs_root() {
        return;
    }
    let place = Place::new();
    chown(place.image("disk.qcow2"), Some(OTHER), Some(OTHER)).expect("chown");
    let user = format!("{OTHER}:{OTHER}");
    let disk = place.mount(&["--user", &user, "--sandbox", "off"]);
    assert_is(disk.pid(), OTHER);
    assert_eq!(of_threads(disk.pid(), "Seccomp")[0], "0");
    assert_eq!(place.sandbox("disk"), format!("off, user {user}"));
    write(disk.path(), 1, 0);
    assert_eq!(disk.stop().code(), Some(0));
    assert_eq!(names(place.roots.path()), ["ringdisk"]);
    assert_eq!(names(&place.root("ringdisk")), [""; 0]);
    // One who may not open the image: it is open. That is said.
    let disk = place.mount(&["--user", "nobody"]);
    assert_is(disk.pid(), NOBODY);
    assert!(disk.output().contains("may not write"), "{}", disk.output());
    assert!(piece(disk.path(), 0, 1 << 20) == pattern(1, 0, 1 << 20));
    write(disk.path(), 2, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&place.image("disk.qcow2"));
}

#[test]
fn a_disk_of_a_machine_is_served_by_the_owner_and_goes_from_process_to_process() {
    if !needs_root() {
        return;
    }
    let place = Place::new();
    let (pidfile, socket) = (place.root("pid"), place.root("socket"));
    let words = ["--pidfile", text(&pidfile), "--queues", "2", "--threads", "2"];
    let mut daemon = place.serve(&words);
    assert_is(daemon.process.pid(), NOBODY);
    assert_confined(daemon.process.pid(), true);
    let mut vm = Vm::started(FrontEnd::connect(&socket), options(false));
    let mut load = load(5);
    load.run(&mut vm, 100);
    let overlay = place.image("overlay.qcow2");
    meanwhile(&mut vm, &mut load, || {
        place.ctl("socket", &["snapshot", text(&overlay)]).ok();
        place.ctl("socket", &["resize", "+4M"]).ok();
        place.ctl("socket", &["resize", "8M", "--shrink"]).ok();
        for _ in 0..2 {
            let new = place.serve(&[&["--upgrade"], &words[..]].concat());
            let finished = std::mem::replace(&mut daemon, new).ends(0);
            assert!(finished.stderr.contains("handed over"), "{}", finished.output());
            assert_is(daemon.process.pid(), NOBODY);
            assert!(place.sandbox("socket").contains("user nobody"));
        }
        place.ctl("socket", &["commit", "--quiet"]).ok();
    });
    assert_eq!(owner(&overlay), NOBODY);
    load.read_all(&mut vm);
    drop(vm);
    place.ctl("socket", &["stop"]).ok();
    let finished = daemon.ends(0);
    assert!(!finished.output().contains("WARN"), "{}", finished.output());
    assert_eq!(names(place.roots.path()), ["ringdisk"]);
    assert_eq!(names(&place.root("ringdisk")), [""; 0]);
    judge(&place.image("disk.qcow2"), "qcow2", &mut load);
}

#[test]
fn a_disk_that_waits_for_its_machine_is_taken_and_served_by_the_user() {
    if !needs_root() {
        return;
    }
    let place = Place::new();
    let (socket, incoming) = (place.root("socket"), place.root("incoming"));
    let words = ["--queues", "2", "--threads", "2", "--user", "nobody"];
    let source = place.serve(&words);
    let image = place.image("disk.qcow2");
    let there = [&words[..], &["--incoming", text(&image), "--vhost-user-blk", text(&incoming)]];
    let mut there = serve_command(&there.concat());
    let destination = Daemon::of(there.env("XDG_RUNTIME_DIR", place.roots.path()));
    for pid in [source.process.pid(), destination.process.pid()] {
        assert_is(pid, NOBODY);
        assert_confined(pid, true);
    }
    let mut vm = Vm::started(FrontEnd::connect(&socket), options(false));
    let mut load = load(11);
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    for index in 0..2 {
        vm.front.vring_base(index).expect("it stops");
    }
    // The area of requests in flight does not move: there are none.
    vm.inflight = None;
    let old = std::mem::replace(&mut vm.front, FrontEnd::connect(&socket));
    vm.resume(FrontEnd::connect(&incoming), BaseRule::Used).expect("the disk is there");
    load.read_all(&mut vm);
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    drop(old);
    source.stop(&[&socket]);
    // What opens images again works, too: the image was opened inside.
    let overlay = place.image("overlay.qcow2");
    place.ctl("incoming", &["snapshot", text(&overlay)]).ok();
    assert_eq!(owner(&overlay), NOBODY);
    place.ctl("incoming", &["commit", "--quiet"]).ok();
    load.read_all(&mut vm);
    drop(vm);
    destination.stop(&[&incoming]);
    judge(&image, "qcow2", &mut load);
}

/// Requests come and go over a mount's own rings, which the user's threads go on with.
#[test]
fn a_mount_over_io_uring_is_the_users_and_does_everything() {
    if !needs_root() {
        return;
    }
    let Some(_switch) = UringParameter::set(true) else { return };
    let place = Place::new();
    let zero_copy = part_needs("zero-copy (Linux 7.3)", crate::common::kernel_is(7, 3));
    let with = ["--zero-copy", "on"];
    let more = if zero_copy { &with[..] } else { &[] };
    let disk = place.mount(&[&["--user", "nobody", "--transport", "uring"], more].concat());
    assert_is(disk.pid(), NOBODY);
    assert_confined(disk.pid(), true);
    write(disk.path(), 1, 0);
    place.ctl("disk", &["snapshot", "--internal", "inside"]).ok();
    let overlay = place.image("overlay.qcow2");
    place.ctl("disk", &["snapshot", text(&overlay)]).ok();
    place.ctl("disk", &["resize", "+1M"]).ok();
    write(disk.path(), 2, 8 * MIB);
    place.ctl("disk", &["commit"]).ok();
    for (seed, offset) in [(1, 0), (2, 8 * MIB)] {
        assert!(piece(disk.path(), offset, 1 << 20) == pattern(seed, offset, 1 << 20));
    }
    let finished = disk.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert!(finished.output().contains("over io_uring"), "{}", finished.output());
    assert_clean(&place.image("disk.qcow2"));
}

/// The kernel opens nothing again when it reads and writes the image itself: it has the descriptor
/// from before.
#[test]
fn a_mount_with_passthrough_is_the_users() {
    if !(needs_root() && needs("FUSE passthrough", crate::common::has_passthrough())) {
        return;
    }
    let place = Place::new();
    let image = place.image("disk.qcow2");
    images::raw(&image, MIB, 1);
    let disk = place.mount(&["--user", "nobody", "--passthrough", "--format", "raw"]);
    assert_is(disk.pid(), NOBODY);
    assert_confined(disk.pid(), true);
    assert!(piece(disk.path(), 0, 1 << 20) == pattern(1, 0, 1 << 20));
    write(disk.path(), 2, 0);
    let stats = place.ctl("disk", &["stats", "--json"]).ok().json();
    assert_eq!((&stats["total"]["reads"], &stats["total"]["writes"]), (&0.into(), &0.into()));
    assert_eq!(disk.stop().code(), Some(0));
    assert!(piece(&image, 0, 1 << 20) == pattern(2, 0, 1 << 20));
}

/// A device belongs to root, so `auto` stays root; a user that is named and may open it does
/// everything, one that may not is warned of.
#[test]
fn a_block_device_is_served_as_the_user_that_is_named() {
    if !needs_root() {
        return;
    }
    let place = Place::new();
    let (backing, socket) = (place.root("backing"), place.root("socket"));
    let serve = |device: &Loop, user: &str| {
        let words = ["-v", "--format", "raw", "--user", user, text(device.device())];
        let mut all = serve_command(&[&words[..], &["--vhost-user-blk", text(&socket)]].concat());
        Daemon::of(all.env("XDG_RUNTIME_DIR", place.roots.path()))
    };
    for (user, owner, is_warned) in
        [("auto", 0, false), ("nobody", NOBODY, false), ("nobody", 0, true)]
    {
        images::sparse(&backing, 8 * MIB);
        let Some(device) = Loop::attach(&backing, &[]) else { return };
        let before = fs::metadata(device.device()).expect("there");
        chown(device.device(), Some(owner), None).expect("chown");
        let daemon = serve(&device, user);
        let in_force = place.sandbox("socket");
        assert_eq!(in_force.contains("stays root: "), user == "auto", "{in_force}");
        assert_eq!(in_force.ends_with("user nobody (65534:65534)"), user == "nobody", "{in_force}");
        assert_confined(daemon.process.pid(), true);
        let mut vm = Vm::started(FrontEnd::connect(&socket), options(false));
        let mut load = load(3);
        load.run(&mut vm, 100);
        load.drain(&mut vm);
        load.read_all(&mut vm);
        drop(vm);
        place.ctl("socket", &["stop"]).ok();
        let finished = daemon.ends(0);
        assert_eq!(finished.output().contains("may not write"), is_warned, "{}", finished.output());
        chown(device.device(), Some(before.uid()), None).expect("chown");
        drop(device);
        fs::remove_file(&backing).expect("it is there");
    }
}

#[test]
fn several_disks_are_served_by_their_owner_if_it_is_one() {
    if !needs_root() {
        return;
    }
    let place = Place::new();
    let second = place.image("second.qcow2");
    images::qcow2(&second, "8M", "");
    place.give(&second);
    let start = || {
        let disk = |image: &str, socket: &str| {
            format!("image={},socket={}", text(&place.image(image)), text(&place.root(socket)))
        };
        let (one, two) = (disk("disk.qcow2", "one"), disk("second.qcow2", "two"));
        Daemon::of(&mut serve_command(&["--disk", &one, "--disk", &two]))
    };
    let sockets = [place.root("one"), place.root("two")];
    let sockets = [sockets[0].as_path(), sockets[1].as_path()];
    let daemon = start();
    assert_is(daemon.process.pid(), NOBODY);
    daemon.stop(&sockets);
    chown(&second, Some(OTHER), Some(OTHER)).expect("chown");
    let daemon = start();
    assert_is_root(daemon.process.pid());
    let stats = ctl_disk(sockets[0], &["stats"]).ok().out;
    assert!(stats.contains("stays root: ") && stats.contains("65533:65533"), "{stats}");
    daemon.stop(&sockets);
}

#[test]
fn a_kept_mount_is_the_owners_again_after_a_kill() {
    if !needs_root() {
        return;
    }
    let place = Place::new();
    let disk = place.mount(&["--keep-mount"]);
    let server = |before: u32| {
        let mut now = children(disk.pid()).into_iter().filter(|pid| *pid != before);
        // It is confined a moment before it has its users again, one thread after the other.
        let is_so = |pid: &u32| {
            let users = of_threads(*pid, "Uid");
            users.len() > 1 && users.iter().all(|user| user.starts_with("65534"))
        };
        now.find(is_so)
    };
    let first = until(Duration::from_secs(20), || server(0)).expect("it serves");
    assert_is(first, NOBODY);
    write(disk.path(), 1, 0);
    let overlay = place.image("overlay.qcow2");
    place.ctl("disk", &["snapshot", text(&overlay)]).ok();
    let mut last = first;
    for seed in 2..4 {
        let pid = Pid::from_raw(i32::try_from(last).expect("a pid")).expect("a pid");
        kill_process(pid, Signal::KILL).expect("it runs");
        write(disk.path(), seed, seed * MIB);
        last = until(Duration::from_secs(20), || server(last)).expect("another one");
        assert_is(last, NOBODY);
    }
    for (seed, offset) in [(1, 0), (2, 2 * MIB), (3, 3 * MIB)] {
        assert!(piece(disk.path(), offset, 1 << 20) == pattern(seed, offset, 1 << 20));
    }
    let finished = disk.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert_eq!(names(place.roots.path()), ["ringdisk"]);
    // Those of a process that was killed are left; the next mount removes them.
    assert_clean(&overlay);
}

#[test]
fn words_that_name_nobody_are_refused() {
    if !needs_root() {
        return;
    }
    let place = Place::new();
    for (word, says) in [
        ("no-such-user", "no user 'no-such-user'"),
        ("4040404", "which group"),
        ("nobody:no-such-group", "no-such-group"),
        ("4294967295:1", "no user's number"),
        ("nobody:", "USER:GROUP"),
        ("root:root", "root stays"),
    ] {
        for mut command in
            [place.mount_command(&["--user", word]), place.serve_command(&["--user", word])]
        {
            let finished = run(&mut command);
            assert_eq!(finished.code(), Some(2), "{word}: {}", finished.output());
            assert!(finished.output().contains(says), "{word}: {}", finished.output());
        }
    }
    assert_eq!(names(place.roots.path()), [""; 0], "nothing was made");
}

#[test]
fn an_ordinary_user_stays_what_it_is() {
    if !(needs_root() && needs("setpriv", has("setpriv"))) {
        return;
    }
    let (directory, program) = for_user(&program(), NOBODY);
    let socket = directory.path().join("socket");
    let as_nobody = |user: &str| {
        let mut out = command(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
        out.args([text(&program), "serve", "--null", "1M", "--user", user]);
        out.args(["--vhost-user-blk", text(&socket)]).env("XDG_RUNTIME_DIR", directory.path());
        out
    };
    for user in ["root", "daemon", "65533:65533", "nobody:0"] {
        let finished = run(&mut as_nobody(user));
        assert_eq!(finished.code(), Some(2), "{user}: {}", finished.output());
        assert!(finished.output().contains("only root can"), "{user}: {}", finished.output());
    }
    for user in ["auto", "nobody", "65534:65534"] {
        Daemon::of(&mut as_nobody(user)).stop(&[&socket]);
    }
}
