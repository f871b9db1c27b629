//! An image in the hands of the kernel.

use std::io::Write;
use std::os::fd::AsFd;

use super::{directory, open, run};
use crate::{ErrorKind, Format, ImageOptions, OverlayOptions};

#[test]
fn nothing_is_put_above_an_image_that_the_kernel_has() {
    run(|ring| async move {
        let directory = directory();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, vec![7; 65536]).expect("an image");
        let options = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
        let disk = open(&ring, path.clone(), &options).await.expect("open");
        let lent = disk.lend().expect("a plain raw image");
        assert!(disk.is_lent());
        let over = directory.path().join("over.qcow2");
        let error = disk.add_overlay(&ring, &over, OverlayOptions::default()).await;
        assert_eq!(error.expect_err("refused").kind(), ErrorKind::Unsupported);
        assert!(!over.exists());
        // What the kernel does with it shows when somebody asks.
        let mut file = std::fs::File::from(lent.as_fd().try_clone_to_owned().expect("dup"));
        file.write_all(&[9; 70_000]).expect("write");
        assert_eq!(disk.size(), 65536);
        disk.follow_length(&ring).await.expect("longer");
        assert_eq!(disk.size(), 70_000);
    });
}

#[test]
fn only_a_file_that_is_the_disk_is_lent() {
    run(|ring| async move {
        let directory = directory();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, vec![7; 65536]).expect("an image");
        // Its first sector is protected, since the format was guessed.
        let guessed = open(&ring, path.clone(), &ImageOptions::default()).await.expect("open");
        assert_eq!(guessed.lend().expect_err("refused").kind(), ErrorKind::Unsupported);
        assert!(!guessed.is_lent());
    });
}
