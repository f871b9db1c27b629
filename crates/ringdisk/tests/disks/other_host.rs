//! A machine moves to another host, with its disk: `ctl mirror` over NBD with TLS, and `serve
//! --incoming` there. The hosts are two network namespaces. The commands are those of
//! `docs/virtual-machines.md`.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

use ringdisk_testkit::certificates;
use ringdisk_testkit::limits::{is_root, needs, needs_root};
use ringdisk_testkit::model::{BaseRule, FrontEnd, Vm, ask, bits, words};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, command, has, ok_words, run, until};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::common::confined::assert_confined;
use crate::common::program;
use crate::common::serving::{Daemon, Place, judge, load, meanwhile, options};

/// Two hosts that are connected; dropping them takes them away.
struct Hosts {
    here: String,
    there: String,
}

impl Hosts {
    fn new() -> Hosts {
        let id = std::process::id();
        let [here, there] = ["a", "b"].map(|side| format!("ringdisk-{side}-{id}"));
        let hosts = Hosts { here, there };
        let Hosts { here, there } = &hosts;
        let [one, two] = ["a", "b"].map(|side| format!("rd{side}{id}"));
        for name in [here, there] {
            ok_words(&["ip", "netns", "add", name]);
        }
        let words = ["ip", "link", "add", &one, "netns", here, "type", "veth", "peer", "name"];
        ok_words(&[&words[..], &[&two, "netns", there]].concat());
        for (name, link, address) in [(here, &one, "10.213.0.1/30"), (there, &two, "10.213.0.2/30")]
        {
            ok_words(&["ip", "-n", name, "address", "add", address, "dev", link]);
            ok_words(&["ip", "-n", name, "link", "set", link, "up"]);
        }
        hosts
    }

    /// A command on one of them.
    fn on(host: &str, words: &[&str]) -> Command {
        let program = program();
        let mut command = command(&[&["ip", "netns", "exec", host, &program][..], words].concat());
        command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS");
        command
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in [&self.here, &self.there] {
            let _ = run(command(&["ip", "netns", "delete", name]));
        }
    }
}

/// Moves it.
fn moves(format: &'static str, packed: bool) {
    if !(needs_root() && needs("ip", has("ip"))) {
        return;
    }
    let hosts = Hosts::new();
    let place = Place::new(format);
    let certificates = place.path("certificates");
    let there = place.path("there");
    for directory in [&certificates, &there] {
        std::fs::create_dir(directory).expect("a directory");
    }
    let _authority = certificates::all(&certificates);
    let (image, new, socket, other) =
        (&place.image, there.join("disk"), &place.socket, there.join("socket"));
    let certificates = text(&certificates);
    let said = ["serve", "--format", format, "--queues", "2", "--threads", "2"];

    // The host where the machine runs.
    let here = ["--allow-path", certificates, "--vhost-user-blk", text(socket), text(image)];
    let source = Daemon::of(&mut Hosts::on(&hosts.here, &[&said[..], &here].concat()));
    let mut vm = Vm::started(FrontEnd::connect(socket), options(packed));
    let mut load = load(21);
    load.run(&mut vm, 300);
    load.drain(&mut vm);

    // The other one gets an empty image, which it serves over NBD, and, when that has ended, to the
    // machine.
    let made = Hosts::on(&hosts.there, &["create", "-q", "-f", format, text(&new), "8M"]);
    assert_eq!(run(made).code(), Some(0));
    let takes = ["serve", "--format", format, text(&new), "--nbd", "10.213.0.2:10809"];
    let takes = [&takes[..], &["--tls-creds", certificates]].concat();
    let takes = Daemon::of(&mut Hosts::on(&hosts.there, &takes));
    let waits = ["--incoming", "--vhost-user-blk", text(&other), text(&new)];
    let destination = Daemon::of(&mut Hosts::on(&hosts.there, &[&said[..], &waits].concat()));
    for daemon in [&source, &takes, &destination] {
        assert_confined(daemon.process.pid(), is_root());
    }

    let ctl = |words: &[&str]| {
        let finished = run(Hosts::on(&hosts.here, words));
        assert_eq!(finished.code(), Some(0), "{words:?}: {}", finished.output());
        finished
    };
    let uri = format!("nbds://10.213.0.2/?tls-certificates={certificates}&tls-hostname=localhost");
    meanwhile(&mut vm, &mut load, || {
        let mirror = ["ctl", text(socket), "mirror", &uri, "--format", "raw", "--name", "move"];
        ctl(&[&mirror[..], &["--write-blocking"]].concat());
    });
    load.run(&mut vm, 200);
    load.drain(&mut vm);

    // QEMU logs what is written to memory, copies that, and stops the machine at the end.
    let log = memfd_create(c"log", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&log, 1 << 20).expect("memory");
    let Vm { front, features, .. } = &mut vm;
    front.ask(ask::SET_LOG_BASE, &words(&[1 << 20, 0]), &[log.as_fd()]).expect("a log");
    front.set(ask::SET_FEATURES, *features | bits::LOG_ALL).expect("agreed");
    load.run(&mut vm, 200);
    load.drain(&mut vm);
    (0..2).for_each(|index| {
        vm.front.vring_base(index).expect("it stops");
    });

    // The copy is whole, and the other host has it to itself.
    ctl(&["job", "cancel", text(socket), "move"]);
    ctl(&["job", "wait", text(socket), "move"]);
    takes.process.signal(rustix::process::Signal::TERM);
    takes.ends(0);

    // The machine goes on there.
    vm.inflight = None;
    let front = FrontEnd::connect(&other);
    let old = std::mem::replace(&mut vm.front, FrontEnd::connect(socket));
    vm.resume(front, BaseRule::Used).expect("the disk is there");
    load.read_all(&mut vm);
    load.run(&mut vm, 300);
    load.drain(&mut vm);
    drop(old);
    source.process.signal(rustix::process::Signal::TERM);
    source.ends(0);
    load.read_all(&mut vm);
    destination.process.signal(rustix::process::Signal::TERM);
    destination.ends(0);
    judge(Path::new(&new), format, &mut load);
    until(LIMIT, || (!other.exists()).then_some(())).expect("the socket goes");
}

#[test]
fn a_machine_moves_to_another_host_with_its_disk() {
    for (format, packed) in [("raw", false), ("qcow2", true)] {
        moves(format, packed);
    }
}
