//! The words of `ringdisk serve --nbd` for what `qemu-nbd` was asked for.
//!
//! Promises: an option of `qemu-nbd` is one or two of ours or refused by its name; none is left
//! out.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use ringdisk_disk::name::FileName;
use ringdisk_nbd::options::CONNECTIONS_MAX;
use ringdisk_qemu_nbd::{Address, Aio, Images, Listen, Serve, image_options};

use crate::cli::{DETECT_ZEROES, DISCARD, word_of};

/// The words, with the names of the program and the command.
///
/// * `is_activated`: descriptor 3 is the listening socket.
///
/// Errors: what we do not have, in the words of `qemu-nbd` where that does not have it either.
pub(super) fn of_serve(asked: &Serve, is_activated: bool) -> Result<Vec<OsString>, String> {
    refuse_what_we_lack(asked)?;
    let mut words: Vec<OsString> = vec!["ringdisk".into(), "serve".into()];
    let mut say = |option: &str, value: OsString| {
        let mut word = OsString::from(format!("--{option}="));
        word.push(value);
        words.push(word);
    };
    say("nbd", if is_activated { "fd:3".into() } else { address(&asked.listen)? });
    say("export-name", asked.name.clone().into());
    if let Some(description) = &asked.description {
        say("description", description.into());
    }
    let most = match asked.shared {
        0 => CONNECTIONS_MAX,
        count => usize::try_from(count).unwrap_or(CONNECTIONS_MAX).min(CONNECTIONS_MAX),
    };
    say("max-connections", most.to_string().into());
    let limit = match asked.handshake_limit_s {
        0 => String::from("none"),
        seconds => format!("{seconds}s"),
    };
    say("handshake-limit", limit.into());
    if !asked.persistent {
        // The first client, or the last of several, ends it.
        say("idle-exit", "0s".into());
    }
    for bitmap in &asked.bitmaps {
        say("bitmap", bitmap.into());
    }
    if let Some(path) = &asked.pid_file {
        say("pidfile", path.into());
    }
    let flags = [("read-only", asked.read_only), ("daemonize", asked.fork)];
    let temporary = ("snapshot", asked.images.temporary && !asked.read_only);
    for (flag, _) in flags.into_iter().chain([temporary]).filter(|(_, is_set)| *is_set) {
        words.push(format!("--{flag}").into());
    }
    of_images(&asked.images, &mut words)?;
    Ok(words)
}

/// Errors: names what we lack.
fn refuse_what_we_lack(asked: &Serve) -> Result<(), String> {
    if asked.device.is_some() {
        return Err(String::from("-c is not supported: connect the device with `nbd-client`"));
    }
    if asked.images.snapshot.is_some() {
        return Err(String::from("-l is not supported: internal snapshots are not exported"));
    }
    Ok(())
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
    let (mut path, mut format) = (images.file.clone(), images.format.clone());
    let (mut offset, mut size) = (images.offset, None);
    let description = match images.are_options {
        true => Some(format!("json:{}", image_options(&file).map_err(|why| cannot(&why))?)),
        false if file.starts_with("json:") => Some(file.clone().into_owned()),
        false => None,
    };
    if let Some(text) = description {
        let name = FileName::parse(text.as_bytes()).map_err(|error| cannot(&error.to_string()))?;
        path = name.path.into();
        format = format.or(name.format.map(|format| format.to_string()));
        offset += name.raw_offset;
        size = name.raw_size.map(|bytes| bytes.saturating_sub(images.offset));
    }
    if let Some(format) = format {
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
    if offset > 0 {
        words.push(format!("--offset={offset}").into());
    }
    if let Some(size) = size {
        words.push(format!("--size={size}").into());
    }
    words.push(format!("--cache={}", images.cache.name()).into());
    words.push(format!("--discard={}", word_of(DISCARD, images.discard)).into());
    words.push(format!("--detect-zeroes={}", word_of(DETECT_ZEROES, images.detect_zeroes)).into());
    // A name may look like an option.
    words.push("--".into());
    if path.as_bytes().is_empty() {
        return Err(cannot("the name is empty"));
    }
    words.push(path);
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
    }

    #[test]
    fn options_of_the_image_become_ours() {
        let options = "--image-opts driver=raw,offset=512,size=1024,file.filename=a";
        has(options, &["--format=raw", "--offset=512", "--size=1024", "a"]);
        has("json:{\"driver\":\"qcow2\",\"file\":{\"filename\":\"a\"}}", &["--format=qcow2", "a"]);
    }

    #[test]
    fn what_we_lack_is_named() {
        for (line, text) in [
            ("-f vmdk disk", "Failed to blk_new_open 'disk': Unknown driver 'vmdk'"),
            ("-l a disk", "-l is not supported: internal snapshots are not exported"),
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
        assert!(words("-c /dev/nbd0 disk").unwrap_err().starts_with("-c is not supported"));
    }
}
