//! The words of `ringdisk serve --nbd` for what `qemu-nbd` was asked for.
//!
//! Promises: an option of `qemu-nbd` is one or two of ours or refused by its name; none is left
//! out.

use std::ffi::OsString;
use std::path::Path;

use ringdisk_disk::SnapshotChoice;
use ringdisk_disk::name::FileName;
use ringdisk_nbd::options::CONNECTIONS_MAX;
use ringdisk_qemu_nbd::{Address, Aio, Images, Listen, Serve, SnapshotName};

use super::device;
use crate::cli::{DETECT_ZEROES, DISCARD, word_of};

/// The words, with the names of the program and the command.
///
/// * `is_activated`: descriptor 3 is the listening socket.
///
/// Errors: what we do not have, in the words of `qemu-nbd` where that does not have it either.
pub(super) fn of_serve(asked: &Serve, is_activated: bool) -> Result<Vec<OsString>, String> {
    let mut words: Vec<OsString> = vec!["ringdisk".into(), "serve".into()];
    let mut say = |option: &str, value: OsString| {
        let mut word = OsString::from(format!("--{option}="));
        word.push(value);
        words.push(word);
    };
    let listen = match &asked.device {
        Some(device) => device::listen(device, &asked.listen),
        None => asked.listen.clone(),
    };
    say("nbd", if is_activated { "fd:3".into() } else { address(&listen)? });
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
    of_images(&asked.images, &mut words)?;
    Ok(words)
}

/// The word for an internal snapshot.
fn choice(snapshot: &SnapshotName) -> SnapshotChoice {
    match snapshot.clone() {
        SnapshotName::IdOrName(text) => SnapshotChoice::IdOrName(text),
        SnapshotName::Both { id, name } => SnapshotChoice::Both { id, name },
    }
}

/// Where clients connect.
///
/// Errors: the port has a name, or cannot be.
fn address(listen: &Listen) -> Result<OsString, String> {
    match listen {
        Listen::Unix(path) => {
            let mut word = OsString::from("unix:");
            word.push(path);
            Ok(word)
        }
        Listen::Tcp(Address { host, port }) if port.parse::<u16>().is_err() => Err(format!(
            "address resolution failed for {host}:{port}: Servname not supported for ai_socktype"
        )),
        Listen::Tcp(Address { host, port }) if host.contains(':') => {
            Ok(format!("[{host}]:{port}").into())
        }
        Listen::Tcp(address) => Ok(address.to_string().into()),
    }
}

/// The image, and how it is opened.
///
/// Errors: options or a format that we do not have.
fn of_images(images: &Images, words: &mut Vec<OsString>) -> Result<(), String> {
    let file = images.file.to_string_lossy();
    let cannot = |why: &str| format!("Failed to blk_new_open '{file}': {why}");
    // Judged here too, for the text of the error.
    let name = match images.are_options {
        true => FileName::of_options(&file),
        false => FileName::of_user(Path::new(&images.file)),
    };
    name.map_err(|error| cannot(&error.to_string()))?;
    if images.are_options {
        words.push("--image-opts".into());
    }
    if let Some(format) = &images.format {
        if !["raw", "qcow2"].contains(&format.as_str()) {
            return Err(cannot(&format!("Unknown driver '{format}'")));
        }
        words.push(format!("--format={format}").into());
    }
    if images.aio == Aio::Native && !images.cache.direct() {
        let why = "aio=native was specified, but it requires cache.direct=on, which was not \
                   specified.";
        return Err(cannot(why));
    }
    if images.offset > 0 {
        words.push(format!("--offset={}", images.offset).into());
    }
    words.push(format!("--cache={}", images.cache.name()).into());
    words.push(format!("--discard={}", word_of(DISCARD, images.discard)).into());
    words.push(format!("--detect-zeroes={}", word_of(DETECT_ZEROES, images.detect_zeroes)).into());
    // A name may look like an option.
    words.push("--".into());
    if images.file.is_empty() {
        return Err(cannot("the name is empty"));
    }
    words.push(images.file.clone());
    Ok(())
}

#[cfg(test)]
mod tests {
    use ringdisk_qemu_nbd::{Invocation, parse};

    use super::*;

    fn words(line: &str) -> Result<Vec<String>, String> {
        let Ok(Invocation::Serve(serve)) = parse("qemu-nbd", line.split(' ').map(Into::into))
        else {
            panic!("{line}")
        };
        let words = of_serve(&serve, false)?.into_iter().skip(2);
        Ok(words.map(|word| word.into_string().unwrap()).collect())
    }

    fn has(line: &str, wanted: &[&str]) {
        let words = words(line).unwrap();
        for word in wanted {
            assert!(words.iter().any(|this| this == word), "{line}: no {word}: {words:?}");
        }
    }

    #[test]
    fn options_become_ours() {
        has("disk", &["--nbd=0.0.0.0:10809", "--max-connections=1", "--idle-exit=0s", "disk"]);
        has("disk", &["--discard=ignore", "--cache=writeback", "--export-name="]);
        has("-t -e 0 -k /s disk", &["--nbd=unix:/s", "--max-connections=10000"]);
        assert!(!words("-t disk").unwrap().contains(&String::from("--idle-exit=0s")));
        has("-b ::1 -p 7 disk", &["--nbd=[::1]:7"]);
        has("-n --discard=unmap --fork --pid-file=/p disk", &["--cache=none", "--daemonize"]);
        has("--handshake-limit=0 -B a -B b disk", &["--handshake-limit=none", "--bitmap=b"]);
        has("-s disk", &["--snapshot"]);
        assert!(!words("-s -r disk").unwrap().contains(&String::from("--snapshot")));
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
        let unknown = words("--image-opts driver=vmdk,file.filename=a").unwrap_err();
        assert!(unknown.starts_with("Failed to blk_new_open 'driver=vmdk,file.filename=a': "));
    }

    #[test]
    fn what_we_lack_is_named() {
        for (line, text) in [
            ("-f vmdk disk", "Failed to blk_new_open 'disk': Unknown driver 'vmdk'"),
            (
                "--aio=native disk",
                "Failed to blk_new_open 'disk': aio=native was specified, but it requires \
                 cache.direct=on, which was not specified.",
            ),
            (
                "-p abc disk",
                "address resolution failed for 0.0.0.0:abc: Servname not supported for ai_socktype",
            ),
        ] {
            assert_eq!(words(line).unwrap_err(), text);
        }
    }
}
