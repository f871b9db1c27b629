//! The words of `ringdisk serve --nbd` for what `qemu-nbd` was asked for.
//!
//! Promises: an option of `qemu-nbd` is one or two of ours; none is left out. What we lack was
//! refused before (`refuse` of crate `qemu-nbd`).

use std::ffi::OsString;

use ringdisk_disk::SnapshotChoice;
use ringdisk_nbd::options::CONNECTIONS_MAX;
use ringdisk_nbd_device::device;
use ringdisk_qemu_nbd::{Address, Images, Listen, Serve, SnapshotName};

use crate::cli::{DETECT_ZEROES, DISCARD, word_of};

/// The words, with the names of the program and the command.
///
/// * `listen`: where the server listens; `None`: descriptor 3 is the listening socket.
pub(super) fn of_serve(asked: &Serve, listen: Option<&Listen>) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["ringdisk".into(), "serve".into()];
    let mut say = |option: &str, value: OsString| {
        let mut word = OsString::from(format!("--{option}="));
        word.push(value);
        words.push(word);
    };
    say("nbd", listen.map_or_else(|| "fd:3".into(), address));
    say("export-name", asked.name.clone().into());
    if let Some(description) = &asked.description {
        say("description", description.into());
    }
    let most = match asked.shared {
        0 => CONNECTIONS_MAX,
        count => usize::try_from(count).unwrap_or(CONNECTIONS_MAX).min(CONNECTIONS_MAX),
    };
    // The kernel is one client, with several connections.
    let of_kernel = asked.device.as_ref().map_or(0, |_| device::connections() - 1);
    say("max-connections", (most + of_kernel).min(CONNECTIONS_MAX).to_string().into());
    let limit = match asked.handshake_limit_s {
        0 => String::from("none"),
        seconds => format!("{seconds}s"),
    };
    say("handshake-limit", limit.into());
    if !asked.persistent || asked.device.is_some() {
        // The first client, or the last of several, ends it. The server of a device ends with it.
        say("idle-exit", "0s".into());
    }
    for bitmap in &asked.bitmaps {
        say("bitmap", bitmap.into());
    }
    if let Some(path) = &asked.pid_file {
        say("pidfile", path.into());
    }
    let snapshot = asked.images.snapshot.as_ref();
    let is_read_only = asked.read_only || snapshot.is_some();
    let flags = [("read-only", is_read_only), ("daemonize", asked.fork || asked.device.is_some())];
    let temporary = ("snapshot", asked.images.temporary && !is_read_only);
    for (flag, _) in flags.into_iter().chain([temporary]).filter(|(_, is_set)| *is_set) {
        words.push(format!("--{flag}").into());
    }
    if let Some(snapshot) = snapshot {
        words.push(format!("--load-snapshot={}", choice(snapshot)).into());
    }
    of_images(&asked.images, &mut words);
    words
}

/// The word for an internal snapshot.
fn choice(snapshot: &SnapshotName) -> SnapshotChoice {
    match snapshot.clone() {
        SnapshotName::IdOrName(text) => SnapshotChoice::IdOrName(text),
        SnapshotName::Both { id, name } => SnapshotChoice::Both { id, name },
    }
}

/// Where clients connect.
fn address(listen: &Listen) -> OsString {
    match listen {
        Listen::Unix(path) => {
            let mut word = OsString::from("unix:");
            word.push(path);
            word
        }
        Listen::Tcp(Address { host, port }) if host.contains(':') => {
            format!("[{host}]:{port}").into()
        }
        Listen::Tcp(address) => address.to_string().into(),
    }
}

/// The image, and how it is opened.
fn of_images(images: &Images, words: &mut Vec<OsString>) {
    if images.are_options {
        words.push("--image-opts".into());
    }
    if let Some(format) = &images.format {
        words.push(format!("--format={format}").into());
    }
    if images.offset > 0 {
        words.push(format!("--offset={}", images.offset).into());
    }
    words.push(format!("--cache={}", images.cache.name()).into());
    words.push(format!("--discard={}", word_of(DISCARD, images.discard)).into());
    words.push(format!("--detect-zeroes={}", word_of(DETECT_ZEROES, images.detect_zeroes)).into());
    // A name may look like an option.
    words.push("--".into());
    words.push(images.file.clone());
}

#[cfg(test)]
mod tests {
    use ringdisk_qemu_nbd::{Invocation, parse};

    use super::*;

    fn words(line: &str) -> Vec<String> {
        let Ok(Invocation::Serve(serve)) = parse("qemu-nbd", line.split(' ').map(Into::into))
        else {
            panic!("{line}")
        };
        let listen = match &serve.device {
            Some(device) => device::listen(device, &serve.listen),
            None => serve.listen.clone(),
        };
        let words = of_serve(&serve, Some(&listen)).into_iter().skip(2);
        words.map(|word| word.into_string().unwrap()).collect()
    }

    fn has(line: &str, wanted: &[&str]) {
        let words = words(line);
        for word in wanted {
            assert!(words.iter().any(|this| this == word), "{line}: no {word}: {words:?}");
        }
    }

    #[test]
    fn options_become_ours() {
        has("disk", &["--nbd=0.0.0.0:10809", "--max-connections=1", "--idle-exit=0s", "disk"]);
        has("disk", &["--discard=ignore", "--cache=writeback", "--export-name="]);
        has("-t -e 0 -k /s disk", &["--nbd=unix:/s", "--max-connections=10000"]);
        assert!(!words("-t disk").contains(&String::from("--idle-exit=0s")));
        has("-b ::1 -p 7 disk", &["--nbd=[::1]:7"]);
        has("-p 0 disk", &["--nbd=0.0.0.0:0"]);
        has("-n --discard=unmap --fork --pid-file=/p disk", &["--cache=none", "--daemonize"]);
        has("--handshake-limit=0 -B a -B b disk", &["--handshake-limit=none", "--bitmap=b"]);
        has("-s disk", &["--snapshot"]);
        assert!(!words("-s -r disk").contains(&String::from("--snapshot")));
        has("-- -disk", &["--", "-disk"]);
        has("-t -c /dev/nbd0 disk", &["--nbd=unix:/var/lock/qemu-nbd-nbd0", "--idle-exit=0s"]);
        has("-c /dev/nbd0 -k /s disk", &["--nbd=unix:/s", "--daemonize"]);
        has("-l a disk", &["--load-snapshot=a", "--read-only"]);
        has("-l snapshot.id=1 disk", &["--load-snapshot=snapshot.id=1"]);
    }

    #[test]
    fn options_of_the_image_become_ours() {
        let options = "--image-opts driver=raw,offset=512,size=1024,file.filename=a";
        let name = "driver=raw,offset=512,size=1024,file.filename=a";
        has(options, &["--image-opts", "--", name]);
        let name = "json:{\"driver\":\"qcow2\",\"file\":{\"filename\":\"a\"}}";
        has(name, &["--", name]);
    }
}
