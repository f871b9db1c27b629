//! Steps of a walk.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringdisk_testkit::images;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, until};
use rustix::process::{Pid, Signal, kill_process};

use super::{DEPTH_MAX, Walk};
use crate::common::serving::SIZE;
use crate::common::tools::{Ran, ringdisk};

/// A new process of a kept disk is allowed five times in 10 s.
const PAUSE: Duration = Duration::from_millis(2100);

/// A command of the walk, as it is run beside the client.
struct Commands {
    target: PathBuf,
}

impl Commands {
    fn ctl(&self, words: &[&str]) -> Ran {
        ringdisk(Path::new("/"), &[&["ctl", text(&self.target)], words].concat())
    }

    fn job(&self, work: &str, words: &[&str]) -> Ran {
        ringdisk(Path::new("/"), &[&["job", work, text(&self.target)], words].concat())
    }
}

impl Walk {
    fn commands(&self) -> Commands {
        Commands { target: self.target.clone() }
    }

    /// Makes a step. Returns what it was.
    pub(super) fn step(&mut self) -> String {
        let chain = self.chain();
        match self.prng.below(18) {
            0..3 if chain.len() < DEPTH_MAX => self.snapshot(),
            3..5 if chain.len() > 1 => self.merge("commit", &chain),
            5 if chain.len() > 1 => self.merge("stream", &chain),
            6..9 => self.mirror(&chain),
            9 => self.given_up(&chain),
            10 => self.refused(&chain),
            11 => self.limit(),
            12 => self.backup(),
            16..18 => self.backup_job(&chain),
            13..16 if self.how.can_be_upgraded() => self.upgrade(&chain),
            13..16 if self.how.is_kept() => self.kill(&chain),
            _ => {
                self.client.flush();
                String::from("flush")
            }
        }
    }

    fn snapshot(&mut self) -> String {
        let path = self.new_path("qcow2");
        let commands = self.commands();
        self.client.beside(|| commands.ctl(&["snapshot", text(&path)]).ok());
        assert_eq!(self.chain()[0], path);
        format!("snapshot {}", path.display())
    }

    /// A commit or a stream to its end, or given up.
    fn merge(&mut self, what: &str, chain: &[PathBuf]) -> String {
        let commands = self.commands();
        let is_cancelled = self.prng.below(3) == 0;
        let speed = if is_cancelled { "256k" } else { "0" };
        let id = format!("j{}", self.next);
        self.next += 1;
        let code = self.client.beside(|| {
            commands.ctl(&[what, "--background", "--name", &id, "--speed", speed]).ok();
            if is_cancelled {
                let cancelled = commands.job("cancel", &[&id]);
                assert!([0, 2].contains(&cancelled.code), "{}", cancelled.err);
            }
            commands.job("wait", &[&id]).code
        });
        assert!(code == 0 || is_cancelled && code == 1, "{what} ended with {code}");
        let now = self.chain();
        match (code, what) {
            (0, "commit") => assert_eq!(now, chain[1..]),
            (0, _) => {
                assert_eq!(now, chain[..1]);
                // Nothing leads from the image on top to the one that was named before.
                self.named = (chain[0].clone(), "qcow2");
            }
            _ => assert_eq!(now, chain),
        }
        format!("{what}, cancelled: {is_cancelled}: {code}")
    }

    /// To a new file: the disk switches over, or the copy is left.
    fn mirror(&mut self, chain: &[PathBuf]) -> String {
        let format = ["qcow2", "raw"][self.below(2)];
        let path = self.new_path(format);
        let commands = self.commands();
        let blocks: &[&str] = if self.prng.coin() { &["--write-blocking"] } else { &[] };
        let pivots = self.prng.below(4) > 0;
        let at_once = self.prng.coin();
        let id = format!("m{}", self.next);
        let words = [&["mirror", "-f", format, "--name", &id, text(&path)], blocks].concat();
        self.client.beside(|| match (pivots, at_once) {
            (true, true) => drop(commands.ctl(&[&words[..], &["--complete"]].concat()).ok()),
            (true, false) => {
                commands.ctl(&words).ok();
                commands.job("complete", &[&id]).ok();
                commands.job("wait", &[&id]).ok();
            }
            (false, _) => {
                commands.ctl(&words).ok();
                commands.job("cancel", &[&id]).ok().says("left as a copy");
                commands.job("wait", &[&id]).ok();
            }
        });
        if pivots {
            assert_eq!(self.chain(), std::slice::from_ref(&path));
            self.named = (path, format);
        } else {
            assert_eq!(self.chain(), chain);
            if format == "qcow2" {
                images::assert_clean(&path);
            }
        }
        format!("mirror to {format}, switches over: {pivots}, at once: {at_once}")
    }

    /// A mirror that is given up while it copies.
    fn given_up(&mut self, chain: &[PathBuf]) -> String {
        let path = self.new_path("qcow2");
        let commands = self.commands();
        let id = format!("g{}", self.next);
        let words = ["mirror", "-f", "qcow2", "--background", "--speed", "64k", "--name", &id];
        let code = self.client.beside(|| {
            commands.ctl(&[&words[..], &[text(&path)]].concat()).ok();
            // Told to switch over, it is not left as a copy where it was ready already.
            let _ = commands.job("complete", &[&id]);
            let _ = commands.job("cancel", &[&id]);
            commands.job("wait", &[&id]).code
        });
        let now = self.chain();
        match code {
            0 => {
                assert_eq!(now, std::slice::from_ref(&path));
                self.named = (path, "qcow2");
            }
            _ => assert_eq!((code, now.as_slice()), (1, chain)),
        }
        format!("a mirror is given up: {code}")
    }

    /// What is no target.
    fn refused(&mut self, chain: &[PathBuf]) -> String {
        let small = self.new_path("raw");
        images::sparse(&small, SIZE / 2);
        let commands = self.commands();
        let top = text(&chain[0]).to_owned();
        self.client.beside(|| {
            let words = ["mirror", "--existing", "--complete", "-f", "raw"];
            commands.ctl(&[&words[..], &[text(&small)]].concat()).ends(3).says("as large");
            commands.ctl(&[&words[..], &[&top]].concat()).ends(2).says("the disk itself");
        });
        assert_eq!(self.chain(), chain);
        String::from("targets that are none")
    }

    fn limit(&mut self) -> String {
        let limit = ["none", "iops=2000", "bps=40M"][self.below(3)];
        let commands = self.commands();
        self.client.beside(|| commands.ctl(&["limit", limit]).ok());
        format!("limit {limit}")
    }

    /// A checkpoint begins and ends.
    fn backup(&mut self) -> String {
        let path = self.new_path("qcow2");
        let target = self.target.clone();
        self.client.beside(|| {
            ringdisk(Path::new("/"), &["backup", "--quiet", text(&target), text(&path)]).ok();
        });
        images::assert_clean(&path);
        String::from("backup")
    }

    /// A job that copies the disk as it is at one instant, or is given up.
    fn backup_job(&mut self, chain: &[PathBuf]) -> String {
        let format = ["qcow2", "raw"][self.below(2)];
        let path = self.new_path(format);
        let is_cancelled = self.prng.below(3) == 0;
        let speed = if is_cancelled { "256k" } else { "0" };
        let commands = self.commands();
        let id = format!("b{}", self.next);
        let words = ["backup", "-f", format, "--background", "--speed", speed, "--name", &id];
        let code = self.client.beside(|| {
            commands.ctl(&[&words[..], &[text(&path)]].concat()).ok();
            if is_cancelled {
                let cancelled = commands.job("cancel", &[&id]);
                assert!([0, 2].contains(&cancelled.code), "{}", cancelled.err);
            }
            commands.job("wait", &[&id]).code
        });
        assert!(code == 0 || is_cancelled && code == 1, "it ended with {code}");
        assert_eq!(self.chain(), chain);
        if format == "qcow2" {
            images::assert_clean(&path);
        }
        format!("backup as a job to {format}, cancelled: {is_cancelled}: {code}")
    }

    /// Another process takes the disk over.
    fn upgrade(&mut self, chain: &[PathBuf]) -> String {
        let old = self.server.take().expect("it is served");
        let mut client = std::mem::replace(&mut self.client, super::Client::None);
        let this = &*self;
        let new = client.beside(|| this.serve(&["--upgrade"]));
        self.client = client;
        let ended = old.finish(LIMIT);
        assert_eq!(ended.code(), Some(0), "{}", ended.output());
        self.server = Some(new);
        until(LIMIT, || (self.ctl(&["stats"]).code == 0).then_some(())).expect("it answers");
        assert_eq!(self.chain(), chain);
        String::from("upgrade")
    }

    /// The serving process is killed: the next one goes on with the disk as it was.
    fn kill(&mut self, chain: &[PathBuf]) -> String {
        if self.killed.is_some_and(|at| at.elapsed() < PAUSE) {
            std::thread::sleep(PAUSE);
        }
        self.killed = Some(Instant::now());
        let old = self.serving();
        self.client.around(|| {
            let pid = i32::try_from(old).ok().and_then(Pid::from_raw).expect("a pid");
            kill_process(pid, Signal::KILL).expect("it is there");
        });
        let answers = || (self.ctl(&["stats"]).code == 0).then_some(());
        until(LIMIT, answers).expect("the next one answers");
        assert_ne!(self.serving(), old);
        assert_eq!(self.chain(), chain);
        String::from("kill")
    }
}
